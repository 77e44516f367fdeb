"""OpenAI's API: its routes, their bodies and their answers."""
