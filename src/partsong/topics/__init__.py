"""Topic models of texts."""
