"""Text in and out of token ids: tokenizer, incremental detokenizer, stop strings, chat template. Torch-free."""
