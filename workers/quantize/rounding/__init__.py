"""Weights to codes: the grid, the methods, scales of inputs and their folds, bits of layers."""
