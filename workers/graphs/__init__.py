"""Capture and replay of a decode step."""
