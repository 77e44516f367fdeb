"""Formats of tool calls, one file each, named as vLLM names its parsers."""
