"""Judging a model on a text: perplexity, and how far it is from another one."""
