"""Grammars that texts follow, on the rank that samples: compiled ones, and each row's place in its own."""
