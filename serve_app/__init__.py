"""The service: HTTP API, model catalogue, checkpoint store and command line, deployed on Ray Serve."""
