"""The information term of FedNMF+MI."""
