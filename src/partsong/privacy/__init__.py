"""Differential privacy: mechanisms, noise, accounting, calibration, audits, and the exposure of sums without noise."""
