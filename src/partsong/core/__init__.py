"""Nouns, protocols, seeds, threads and one codec."""
