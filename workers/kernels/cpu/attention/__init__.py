"""Compiled attention kernels for CPUs: decodes, chunks of prompts, latents."""
