"""Attacks on what parties send, from recorded runs."""
