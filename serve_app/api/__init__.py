"""A request, from its parsed body to the chunks of its reply. Start with `opening.py`."""
