"""The floor of the command line: flags, what is written to the terminal, and parts of verbs that are none."""
