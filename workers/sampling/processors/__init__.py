"""Changes logits before a token is chosen: one module per logits processor, and the chain that calls them."""
