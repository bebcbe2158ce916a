"""What federations cost: in one process, and between processes over Flower."""
