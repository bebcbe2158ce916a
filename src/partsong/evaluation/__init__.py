"""Metrics and attacks."""
