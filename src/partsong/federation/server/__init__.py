"""The coordinator of a run."""
