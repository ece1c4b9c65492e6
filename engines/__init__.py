"""Inference engines: each loads one base model and generates tokens for batches of requests. Start with `protocol`."""
