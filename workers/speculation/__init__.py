"""Speculative decoding: proposers of draft tokens, on the ranks; what became of drafts, for answers."""
