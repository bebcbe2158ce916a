"""Error against ε, the cost of noise, and of secure sums."""
