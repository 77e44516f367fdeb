"""The thread that runs one engine: of a group, of a batch file, of an LLM."""
