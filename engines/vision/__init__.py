"""Images in prompts: the vision tower of a transformers model in front of its language model."""
