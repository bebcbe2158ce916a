"""Figures of the game paper (Singh, 2021)."""
