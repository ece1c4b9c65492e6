"""Images of a request: from the URL that the caller gave to the tensors that the model's vision tower takes."""
