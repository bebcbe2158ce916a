"""Attacks on recorded runs: what can be reconstructed from what parties send."""
