"""The catalogue: base models with their tokenizers and renderers, and what the request field `model` resolves to."""
