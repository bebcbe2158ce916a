"""Parties agree on words by sums alone."""
