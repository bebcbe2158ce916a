"""Figures of the DSANLS paper (Qian et al., 2020)."""
