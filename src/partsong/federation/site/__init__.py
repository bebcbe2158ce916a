"""A site of a run."""
