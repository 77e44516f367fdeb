"""What is written, durably: tensors, the forms of quantized layers, hidden states."""
