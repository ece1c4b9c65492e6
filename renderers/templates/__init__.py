"""Jinja chat templates: run in a sandbox, bounded, with the provenance of every character."""
