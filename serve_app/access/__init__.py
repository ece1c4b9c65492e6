"""Who may do what, and how much of it: keys and their limits."""
