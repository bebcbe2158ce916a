"""Metrics of models, quality of topics, and how far a game is from its equilibrium."""
