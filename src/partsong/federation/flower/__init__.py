"""Server and site processes over Flower, which carries the messages."""
