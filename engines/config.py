"""How one engine is set up: a frozen value, checked when it is made."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["auto", "bfloat16", "float16", "float32"]
AttentionName = Literal["auto", "sdpa", "native", "triton", "varlen", "flashinfer"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Raises `ValueError` naming field, limit and value.

    `source`: a folder, a hub id or a `.gguf` file. `context_length` None: the model's own. `kv_cache_bytes` None: the
    share `memory_fraction` of the memory that is free once the weights are loaded, for one engine: several that start
    at a time on one machine each see all of it. `max_step_tokens`: prompt tokens computed per step while nothing is
    being decoded; `max_step_tokens_decoding`: the most while others decode; `prefill_ratio`: it is cut below that so
    that it takes at most this many times as long as the decoding itself, which bounds how long a prefill can hold up
    the next token of the others. `adapter_bytes`: budget for the weights of
    loaded adapters; `max_adapters`: how many may be loaded at once; those beyond wait in a fair order. `exact`: results
    are bit-equal whatever the company and chunking (batch invariance); float32, and slow where the C kernels do not
    compute it, for torch then has one thread. `threads` None: the cores this process may use.
    `tensor_parallel`: devices that share the model, a process on each; `threads`, `kv_cache_bytes` and `adapter_bytes`
    are each one's then.
    `attention`: "native" are the C kernels for Llama-like models on a CPU, built with the machine's compiler into
    `kernel_cache`; "triton" are kernels for CUDA devices, "varlen" and "flashinfer" the same with torch's
    FlashAttention, or with that library, for the prefill; "sdpa" is torch for all models; "auto" is "native" or
    "triton" where it can be had, else "sdpa". `cuda_graphs`: on a device decode steps are recorded once and replayed.
    `overlap`: each of those is started before the tokens of the one before it are on the host.
    """

    source: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: DType = "auto"
    device: str = "auto"
    context_length: int | None = None
    block_size: int = 16
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.5
    prefix_cache: bool = True
    max_running: int = 64
    max_waiting: int = 1024
    max_step_tokens: int = 1024
    max_step_tokens_decoding: int = 256
    prefill_ratio: float = 1.5
    image_cache_bytes: int = 256 << 20
    max_adapters: int = 256
    max_adapter_rank: int = 64
    adapter_bytes: int = 4 << 30
    max_adapter_file_bytes: int = 2 << 30
    adapter_loaders: int = 2
    adapter_load_timeout_s: float = 60.0
    attention: AttentionName = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    kernel_cache: str = "~/.cache/roundhouse/kernels"
    exact: bool = False
    threads: int | None = None
    tensor_parallel: int = 1
    self_test: bool = True

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be greater than 0, not {value!r}.")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must be in (0, 1], not {self.memory_fraction!r}.")
        if self.block_size % 16:
            raise ValueError(f"block_size must be a multiple of 16, not {self.block_size!r}.")
        if not self.source:
            raise ValueError("source must name a folder, a hub id or a .gguf file, not ''.")
        if self.exact and self.dtype not in ("float32", "auto"):
            raise ValueError(f"exact needs dtype float32, not {self.dtype!r}.")
        if self.tensor_parallel > 1 and (self.exact or self.attention == "native" or self.source.endswith(".gguf")):
            what = "exact" if self.exact else "attention 'native'" if self.attention == "native" else "a GGUF file"
            raise ValueError(f"tensor_parallel must be 1 with {what}, not {self.tensor_parallel!r}.")
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} must be at most {most}, not {value!r}.")


_LIMITS = {
    "max_step_tokens": 1 << 20,
    "max_step_tokens_decoding": 1 << 20,
    "max_running": 1 << 16,
    "threads": 1024,
    "tensor_parallel": 64,
}

_POSITIVE = (
    "context_length",
    "block_size",
    "kv_cache_bytes",
    "max_running",
    "max_waiting",
    "max_step_tokens",
    "max_step_tokens_decoding",
    "prefill_ratio",
    "image_cache_bytes",
    "max_adapters",
    "max_adapter_rank",
    "adapter_bytes",
    "max_adapter_file_bytes",
    "adapter_loaders",
    "adapter_load_timeout_s",
    "threads",
    "tensor_parallel",
)
