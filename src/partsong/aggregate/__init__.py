"""Many messages to one model: sums and means, reductions, server updates."""
