"""A running service: which one, and the client behind `tandem chat` and `tandem complete`."""
