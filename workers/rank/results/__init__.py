"""What a step was: its tokens into the row table, and its result for the coordinator."""
