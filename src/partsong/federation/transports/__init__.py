"""Ways for requests and replies."""
