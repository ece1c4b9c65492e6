"""The deployments that Serve starts for requests and models, and every metric, declared once."""
