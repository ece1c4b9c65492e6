"""Logits to tokens: penalties, draws, log-probabilities."""
