"""Which component is which: alignments between factors whose rows come in different orders."""
