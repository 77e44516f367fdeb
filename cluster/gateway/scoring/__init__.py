"""Scores of pairs of texts: /v1/score, and /v1/rerank in the words of Jina and Cohere."""
