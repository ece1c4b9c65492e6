"""What the model says to the caller: chunks, whole replies, log-probabilities and scores."""
