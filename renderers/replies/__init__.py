"""Token ids to text and events: detokenising, stop strings, tags."""
