"""Grids on generated data that settings of the solvers are chosen from."""
