"""Reproductions of published results: one folder per paper or theme, one command per figure or table."""
