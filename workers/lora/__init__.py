"""The rank half of LoRA: where adapters lie on the device, how they get there, what they add to each layer."""
