"""Products with quantized weights on GPUs."""
