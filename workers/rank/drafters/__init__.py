"""Drafts that a model makes: the model beside the one that is served, on one rank, and how its guesses are drawn."""
