"""Conversations: from messages to a generation, and its answer as OpenAI's chat completions."""
