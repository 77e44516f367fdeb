"""Decisions before the start: the model folder, devices, placement, checks of the settings."""
