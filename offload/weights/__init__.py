"""Layers that stream through two buffers when a device does not hold all weights."""
