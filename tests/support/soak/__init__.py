"""Mixed load on a running service: its clients, what they may be told, and what the service holds meanwhile."""
