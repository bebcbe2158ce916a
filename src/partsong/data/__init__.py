"""Private data: matrices seen through products, tables with names, checks, partitions, synthetic data."""
