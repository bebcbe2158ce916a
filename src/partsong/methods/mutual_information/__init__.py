"""The mutual information term of FedNMF+MI: mini-batches, critics and descent."""
