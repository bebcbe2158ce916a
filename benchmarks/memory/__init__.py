"""Peak memory of fits, in one process and over ranks."""
