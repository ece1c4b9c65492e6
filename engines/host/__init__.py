"""The machine around the engine: processor cores, switching between threads, and the delivery of tokens. No torch."""
