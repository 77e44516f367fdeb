"""Weights that are not held as a checkpoint stores them: their formats as data, and their products in torch."""
