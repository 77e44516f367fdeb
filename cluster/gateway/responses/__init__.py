"""OpenAI's Responses API over conversations."""
