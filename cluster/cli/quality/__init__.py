"""Verbs about how good a model is, and in fewer bits."""
