"""Reads and checks LoRA adapters in PEFT's format, from folders and URLs. Torch-free."""
