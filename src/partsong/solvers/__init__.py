"""What one party computes alone."""
