"""A GGUF file as a model's folder: its metadata as config.json and the tokenizer's files."""
