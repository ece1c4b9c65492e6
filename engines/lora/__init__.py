"""LoRA adapters: loaded, kept in device slots, and applied to the base model for each request in a batch."""
