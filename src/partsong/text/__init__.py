"""Text in: documents, words, counts, and a vocabulary that parties agree on without pooling."""
