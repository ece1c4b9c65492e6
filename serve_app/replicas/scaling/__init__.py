"""How many replicas a model needs: what a replica tells of its load, and what Serve's controller makes of it."""
