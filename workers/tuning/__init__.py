"""Tiles of kernels, chosen by profiling on the device that is there."""
