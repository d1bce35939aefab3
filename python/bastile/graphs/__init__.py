"""The layers of a training step, of decoders, encoders and towers, as CUDA graphs, captured and replayed behind the
model's ordinary call.

docs/graphs.md says what is captured when, and what each part looks at."""
