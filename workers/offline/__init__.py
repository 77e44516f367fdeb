"""Offline use: LLM, which runs an engine in the calling thread, with its inputs and outputs."""
