"""Secure aggregation: the server learns the sum of the parties' uploads and no single one."""
