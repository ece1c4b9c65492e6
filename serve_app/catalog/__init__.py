"""What is served: models, their tokenizers and renderers, and what a `model` field resolves to."""
