"""Requests to a slug of the marketplace: which endpoint takes them, and what it answers."""
