"""The fit loop around an engine."""
