"""Evaluation: model metrics per party, topic quality, and the distance of a game from its equilibrium."""
