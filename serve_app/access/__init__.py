"""Authentication and rate limits: API keys, what each key may use, and how much."""
