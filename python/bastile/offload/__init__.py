"""The inputs of checkpointed layers, kept in the host's memory between the forward and the backward pass."""
