"""Reads config.json into an ArchSpec."""
