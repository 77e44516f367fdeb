"""Hand-written device kernels, one family a file, each beside a torch twin of the same name."""
