"""Kernels of attention over latents."""
