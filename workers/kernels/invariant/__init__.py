"""Kernels of --batch-invariant, in which a row's result depends on that row alone."""
