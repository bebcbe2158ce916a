"""Gene programs of cNMF with partsong's factorization."""
