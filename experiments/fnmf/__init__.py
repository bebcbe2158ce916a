"""Figures 1 to 3 and Table 1 of the FNMF paper (Dalleiger & Gionis, 2025)."""
