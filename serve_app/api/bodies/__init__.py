"""The body of a request: JSON to values, within bounds, without what is ignored."""
