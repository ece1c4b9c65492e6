"""The decoder layers of Llama-like models in C, for the CPU. Built at first use; without a compiler torch takes over."""
