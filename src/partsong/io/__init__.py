"""Read and write files: tables, weights, models and checkpoints. No pickle."""
