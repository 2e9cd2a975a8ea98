"""Model definitions over the ops of `specgen.kernels`, and loading of their weights."""
