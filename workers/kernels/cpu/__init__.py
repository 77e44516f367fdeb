"""C kernels for CPUs, compiled at the first start, and their Python side."""
