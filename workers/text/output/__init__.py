"""What a model's text says beside its answer: thinking, tool calls. Torch-free."""
