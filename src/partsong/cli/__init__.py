"""The command line: one module per command; names become objects here and nowhere else."""
