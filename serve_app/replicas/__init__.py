"""The way from an ingress to the model replicas: routing, readiness, and the channel that tokens come over."""
