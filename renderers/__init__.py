"""Renderers: a conversation to prompt tokens, and reply tokens back to text, reasoning and tool calls."""
