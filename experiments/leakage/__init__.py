"""What recorded uploads disclose to the server."""
