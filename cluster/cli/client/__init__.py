"""A running service: which one, and the client of the verbs that send it requests."""
