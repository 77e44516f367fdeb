"""The client behind `tandem chat` and `tandem complete`."""
