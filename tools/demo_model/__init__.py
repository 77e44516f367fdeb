"""Training of the bundled demo model and its adapters: corpus, tokenizer, training, evaluation."""
