"""The side channel for tokens: one TCP connection from each replica to each ingress."""
