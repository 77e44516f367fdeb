"""The floor of the command line: flags of verbs, and what is written to the terminal."""
