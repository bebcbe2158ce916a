"""Reproductions of published results: one module per figure or table, each a command of its own."""
