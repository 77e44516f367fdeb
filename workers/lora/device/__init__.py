"""Adapters on a rank: pages of a slab, host copies, the LoRA layers."""
