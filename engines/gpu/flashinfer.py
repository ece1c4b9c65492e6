"""Prefill by flashinfer, where its package is installed. It reads blocks of any size in place, and knows windows and
soft caps.
"""

from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from engines.attention.interface import Attention
from engines.gpu.attention import PagedLayout
from engines.gpu.prefill import HALVES, PrefillBackend, spread, window_left
from engines.interface.errors import ModelRefused
from engines.tensors.kv_cache import KVCache

_HEAD_SIZES = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20


def wrappers_of(device: torch.device) -> Callable[[], Any]:
    """Makes `flashinfer.BatchPrefillWithPagedKVCacheWrapper`s. Raises `ModelRefused` where this is not possible."""
    if device.type != "cuda":
        raise ModelRefused(f"attention = 'flashinfer' needs a CUDA device, not {device}.")
    try:
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    except (ImportError, AttributeError) as exc:
        raise ModelRefused(f"attention = 'flashinfer' is not possible here: {exc}") from exc
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # one at a time is at work
    return lambda: wrapper(workspace, "NHD")


class _Kind(NamedTuple):
    """What layers that share one plan have in common."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None


class FlashInferBackend(PrefillBackend):
    """Implements `attention.interface.AttentionBackend`. `dtypes`: of Q, K and V; `sizes`: of heads."""

    reads_whole_blocks = True  # its documentation does not exclude it

    def __init__(
        self,
        cache: KVCache,
        make_wrapper: Callable[[], Any],
        *,
        num_programs: int,
        dtypes: tuple[torch.dtype, ...] = HALVES,
        sizes: tuple[int, ...] = _HEAD_SIZES,
    ) -> None:
        super().__init__(cache, num_programs=num_programs)
        self._make_wrapper = make_wrapper
        self._dtypes = dtypes
        self._sizes = sizes
        self._planned: dict[_Kind, tuple[PagedLayout, Any]] = {}

    def takes(self, q: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout) -> bool:
        size = q.shape[-1]
        return q.dtype in self._dtypes and size in self._sizes and values.shape[-1] == size and attention.sinks is None

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout
    ) -> torch.Tensor:
        heads, size = q.shape[1:]
        kind = _Kind(heads, values.shape[2], size, q.dtype, attention.scale, attention.window, attention.softcap)
        planned, wrapper = self._planned.get(kind) or (None, self._make_wrapper())
        if planned is not layout:
            _plan(wrapper, kind, layout, values.shape[1])
            self._planned[kind] = layout, wrapper
        out: torch.Tensor = wrapper.run(q, (keys, values))
        return out


def _plan(wrapper: Any, kind: _Kind, layout: PagedLayout, block_size: int) -> None:
    """flashinfer gets on the host the values that it reads on the host."""
    starts, sequence, place = spread([-(-end // block_size) for end in layout.ends], layout.block_tables.device)
    wrapper.plan(
        torch.tensor([0, *accumulate(layout.lengths)], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        layout.block_tables[sequence, place],
        torch.tensor([(end - 1) % block_size + 1 for end in layout.ends], dtype=torch.int32),
        kind.heads,
        kind.kv_heads,
        kind.size,
        block_size,
        causal=True,  # counted from the ends of the sequences
        sm_scale=kind.scale,
        window_left=window_left(kind.window),
        logits_soft_cap=kind.softcap,
        q_data_type=kind.dtype,
        kv_data_type=kind.dtype,
    )
