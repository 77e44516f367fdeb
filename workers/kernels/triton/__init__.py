"""Triton kernels; each has a torch twin."""
