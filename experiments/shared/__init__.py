"""What several reproductions use: data with planted factors, and classification of documents by their topics."""
