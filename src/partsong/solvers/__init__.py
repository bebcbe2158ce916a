"""Solvers for one party's problem: update rules, half-steps, initialization, local steps, games, LDA inference."""
