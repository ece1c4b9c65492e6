"""One file per model family: messages to token ids and back."""
