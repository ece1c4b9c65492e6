"""Images of a request: from the caller's URL to the tensors that the model's vision tower takes as input."""
