"""Files that are complete once they have their names: tensors, forms of quantized layers, hidden states."""
