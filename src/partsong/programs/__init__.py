"""Shapes of communication: what a party does, what the server does, as pure functions."""
