"""Work of a rank before it is ready: steps that measure memory, and captures."""
