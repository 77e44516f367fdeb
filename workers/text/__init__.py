"""Conversion between text and token ids: tokenizer, detokenizer, stop strings, chat template. Torch-free."""
