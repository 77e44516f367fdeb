"""Verbs about the quality of a model."""
