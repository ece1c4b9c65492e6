"""What the libraries that can replace the Triton kernels for the prefill have in common."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from engines.attention.interface import Attention
from engines.gpu.attention import PagedLayout, TritonBackend
from engines.tensors.transfer import to_device

HALVES = (torch.float16, torch.bfloat16)


class PrefillBackend(TritonBackend):
    """Decoding, and whatever `takes` rejects, goes through the Triton kernels."""

    def takes(self, q: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout) -> bool:
        """Whether the library computes this."""
        raise NotImplementedError

    def prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout
    ) -> torch.Tensor:
        """The same as `gpu.attention.attend`, computed by the library."""
        raise NotImplementedError

    def compute(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout
    ) -> torch.Tensor:
        if max(layout.lengths) == 1 or not self.takes(q, values, attention, layout):
            return super().compute(q, keys, values, attention, layout)
        return self.prefill(q.contiguous(), keys, values, attention, layout)


def window_left(window: int | None) -> int:
    """How many earlier tokens a token attends to; -1 for all."""
    return window - 1 if window else -1


def spread(counts: Sequence[int], device: torch.device) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """For consecutive items, so many of each sequence: where the items of each sequence begin [n + 1]. On the device,
    int64: the sequence of each item, and its index within that sequence [sum].
    """
    starts = [0, *accumulate(counts)]
    sequence = torch.repeat_interleave(to_device(counts, device), output_size=starts[-1])
    return starts, sequence, torch.arange(starts[-1], device=device) - to_device(starts, device)[sequence]
