"""Edits of logits, limits, draws, rules and log probabilities in Triton."""
