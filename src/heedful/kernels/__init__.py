"""Fast paths. One folder a kernel: the same signature in plain torch and, where it pays, in Triton."""
