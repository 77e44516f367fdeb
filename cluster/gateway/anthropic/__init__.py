"""Anthropic's Messages API over conversations."""
