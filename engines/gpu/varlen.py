"""Prefill by torch's attention over sequences of many lengths (`torch.nn.attention.varlen`).

It is FlashAttention 2, or 3 where its package is installed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from engines.attention.interface import Attention
from engines.gpu.attention import PagedLayout
from engines.gpu.prefill import HALVES, PrefillBackend, spread, window_left
from engines.interface.errors import ModelRefused
from engines.tensors.kv_cache import KVCache
from engines.tensors.transfer import to_device

logger = logging.getLogger(__name__)

_LARGEST_HEAD = 256
_PAGE = 256
"""FlashAttention 2 reads pages of a multiple of this many tokens."""

MOST_GATHERED = 1 << 16
"""Tokens of all sequences together: the default of `VarlenBackend`."""


@dataclass(frozen=True, slots=True)
class Flash:
    """`attend`: takes the arguments of `torch.nn.attention.varlen.varlen_attn`. `dtypes`: of Q, K and V.

    `page`: blocks of a multiple of so many tokens are read in place. From other blocks K and V are gathered.
    """

    attend: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]
    page: int

    @classmethod
    def of_torch(cls, device: torch.device) -> "Flash":
        """Raises `ModelRefused` where torch has none. FlashAttention 3 replaces 2 in the whole process."""
        try:
            from torch.nn.attention import activate_flash_attention_impl
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as exc:  # of an older torch
            raise ModelRefused(f"attention = 'varlen' is not possible here: {exc}") from exc
        if device.type != "cuda":
            raise ModelRefused(f"attention = 'varlen' needs a CUDA device, not {device}.")
        page, (capability, minor) = _PAGE, torch.cuda.get_device_capability(device)
        if capability < 8:
            raise ModelRefused(
                f"attention = 'varlen' needs compute capability 8.0, and {device} has {capability}.{minor}."
            )
        if capability == 9 and find_spec("flash_attn_interface") is not None:
            activate_flash_attention_impl("FA3")
            page = 1
        logger.info("prefill by FlashAttention %d", 3 if page == 1 else 2)
        return cls(varlen_attn, HALVES, page)

    def takes(self, q: torch.Tensor, values: torch.Tensor, attention: Attention) -> bool:
        """Supported: no soft caps, no sinks, and one head size for K and V."""
        size = q.shape[-1]
        return (
            q.dtype in self.dtypes
            and attention.softcap is None
            and attention.sinks is None
            and values.shape[-1] == size <= _LARGEST_HEAD
            and size % 8 == 0
        )


class VarlenBackend(PrefillBackend):
    """Implements `attention.interface.AttentionBackend`.

    `most_gathered`: limit on the tokens of all sequences together whose K and V are copied for a call. Beyond it the
    Triton kernels read the blocks.
    """

    def __init__(self, cache: KVCache, flash: Flash, *, num_programs: int, most_gathered: int = MOST_GATHERED) -> None:
        super().__init__(cache, num_programs=num_programs)
        self._flash = flash
        self._most_gathered = most_gathered
        self._gathers = bool(cache.block_size % flash.page)
        # FlashAttention 3 loads whole pages of V, and 0 times what is not finite is not 0.
        self.reads_whole_blocks = not self._gathers
        self._gathered: tuple[PagedLayout, torch.Tensor, torch.Tensor] | None = None

    def takes(self, q: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout) -> bool:
        is_too_much = self._gathers and sum(layout.ends) > self._most_gathered
        return not is_too_much and self._flash.takes(q, values, attention)

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout
    ) -> torch.Tensor:
        starts = None
        pages = {"seqused_k": layout.kv_lens, "block_table": layout.block_tables}
        if self._gathers:
            starts, places = self._places(layout, values.shape[1])
            keys, values = (x.flatten(0, 1).index_select(0, places) for x in (keys, values))
            pages = {}
        out: torch.Tensor = self._flash.attend(
            q,
            keys,
            values,
            layout.row_starts,
            starts,
            max(layout.lengths),
            max(layout.ends),
            scale=attention.scale,
            window_size=(window_left(attention.window), 0),  # none after it, counted from the ends of the sequences
            enable_gqa=True,
            # In one piece: with pages, torch's FlashAttention 2 can leave rows unwritten that it computes in several
            # (pytorch issue 194167), and results then depend on batch composition.
            num_splits=1,
            **pages,
        )
        return out

    def _places(self, layout: PagedLayout, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each sequence's keys begin among all keys [n + 1] int32, and where those lie in the cache. The same for
        all layers.
        """
        if self._gathered is None or self._gathered[0] is not layout:
            device = layout.kv_lens.device
            starts, sequence, position = spread(layout.ends, device)
            blocks = layout.block_tables[sequence, position // block_size].long()
            places = blocks * block_size + position % block_size
            self._gathered = layout, to_device(starts, device, torch.int32), places
        return self._gathered[1:]
