"""Times of steps: what a step computes, the times of it, and their fit to step logs."""
