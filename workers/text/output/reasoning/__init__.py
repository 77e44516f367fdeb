"""Formats of thinking."""
