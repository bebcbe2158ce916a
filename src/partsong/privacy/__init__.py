"""Privacy: what is added to, or put around, that which leaves a party."""
