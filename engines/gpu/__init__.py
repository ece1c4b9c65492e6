"""Computing on CUDA devices: Triton kernels, attention and adapters on them, decode steps as CUDA graphs."""
