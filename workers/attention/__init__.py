"""Paged attention: a Protocol, a reference implementation, and one implementation per device."""
