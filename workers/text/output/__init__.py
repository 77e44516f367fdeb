"""Parts of a model's text beside its answer: thinking, tool calls. Torch-free."""
