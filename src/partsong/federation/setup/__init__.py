"""Folders, keys and certificates."""
