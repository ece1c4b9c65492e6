"""The channel that tokens come over: one TCP connection from each replica to each ingress."""
