"""Replay of request traces at a rate, and the measurements beside it.

KV tiers run on conversations, LoRA adapters on requests drawn by Zipf's law. `__main__` has the commands.
"""
