"""Sequences, the requests they came from, and counts."""
