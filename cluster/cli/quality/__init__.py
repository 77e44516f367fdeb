"""Verbs about how good a model is in fewer bits."""
