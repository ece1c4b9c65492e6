"""What a step computes on: the batch, the KV cache, transfers between host and device."""
