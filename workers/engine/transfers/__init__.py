"""Tickets of KV and adapter moves, and when a move is worth it."""
