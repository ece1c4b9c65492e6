"""The transformers model: loaded, and with linear layers that compute by tiles or in oneDNN's layout."""
