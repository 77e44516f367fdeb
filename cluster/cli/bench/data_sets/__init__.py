"""The prompts of `tandem bench`: made up, from files of texts, or as traces recorded them."""
