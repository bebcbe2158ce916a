"""A federation of parties on their own machines: what each side keeps, says and refuses, over any transport."""
