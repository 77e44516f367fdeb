"""Hand-written device kernels, one family per file, each beside a torch twin of the same name."""
