"""Families of models as rows of data."""
