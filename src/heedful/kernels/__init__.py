"""Fast kernels, one folder each: the same signature in plain torch and, where it is faster, in Triton."""
