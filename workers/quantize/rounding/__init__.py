"""How weights become codes: the grid, the methods, scales of inputs and where they go, bits of layers."""
