"""What runs, in which order, and where K and V lie: plain Python, no torch."""
