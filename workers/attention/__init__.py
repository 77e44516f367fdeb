"""Paged attention: one Protocol, an oracle, and an implementation per device."""
