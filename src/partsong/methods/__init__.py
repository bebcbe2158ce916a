"""Federated and distributed programs."""
