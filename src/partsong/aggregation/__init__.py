"""Combine the uploads of many parties into one aggregate."""
