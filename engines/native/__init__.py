"""The decoder layers of Llama-like models in C, for the CPU. Without a compiler, torch computes them."""
