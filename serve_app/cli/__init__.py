"""The command line, `python -m serve_app`: start, deploy and try the service, and check its configuration."""
