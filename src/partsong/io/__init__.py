"""Files in and out: tables, weights, models and checkpoints; no pickle anywhere."""
