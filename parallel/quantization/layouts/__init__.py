"""The layouts in which producers' checkpoints store matrices, a file for each kind."""
