"""Files that a vocabulary may stand in, each made into a tokenizer of the `tokenizers` library."""
