"""Speculative decoding: proposers of draft tokens, on the ranks."""
