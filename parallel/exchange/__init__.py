"""Collectives behind those of collectives.py: through shared memory, and counted step by step."""
