"""The ways in which checkpoints store weights, read of config.json and of files beside it."""
