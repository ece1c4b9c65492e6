"""`python -m serve_app`: check, up, chat, keys, models, checkpoints, render."""
