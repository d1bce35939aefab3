"""Where a training step's time goes, with stock Transformers and with Bastile."""
