"""Flower's two components, and how its servers are started: the folder `app` names them, and holds no code."""
