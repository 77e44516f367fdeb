"""Work of a rank between its weights and its first step: captures."""
