"""Transport: who runs where, and when. Engines know nothing of NMF."""
