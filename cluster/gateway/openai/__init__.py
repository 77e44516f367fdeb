"""The OpenAI protocol: schemas, prompts, answers, routes' handlers."""
