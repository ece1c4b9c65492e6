"""Slugs with several endpoints: which one is asked, and what remote ones are sent."""
