"""Post-training quantization: a checkpoint is rounded layer by layer through the decoder, to compressed-tensors."""
