"""LoRA adapters of one group: host copies, places on the device, who waits for them."""
