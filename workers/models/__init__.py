"""The decoder: model families as data, its layers, and its assembly on a rank."""
