"""Private data: matrices accessed through products, tables with names, checks, and partitions."""
