"""Adapters on disk: PEFT's configuration, tensor files, names, and which layers they change."""
