"""Changes logits before a token is drawn."""
