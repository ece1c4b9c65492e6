"""The path from an ingress to the model replicas: routing, readiness, and the channel that carries tokens back."""
