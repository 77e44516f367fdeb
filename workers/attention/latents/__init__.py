"""Attention over latents (DeepSeek-V2): Protocols of its own, and one implementation per device."""
