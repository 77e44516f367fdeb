"""`tandem distill`: draft models and heads that guess a model's tokens, learned from the model's own answers."""
