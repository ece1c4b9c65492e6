"""Adapters applied to a running model: wrappers around its linear and embedding layers, many adapters in one batch.

The reference for every faster way: for each adapter in the batch, y[rows] += scale * B (A x[rows]). Ranks are never
padded, and modules that no loaded adapter touches are not wrapped, so adapters that are loaded but unused cost nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from engines.errors import AdapterRefused
from engines.lora.context import AdapterContext
from engines.lora.weights import AdapterWeights, LoraPair

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [rows, in], w [out, in] -> [rows, out]"""


def multiply_rowwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As `F.linear`, but the bits of a row do not depend on the other rows. Slow: for the exact mode."""
    return torch.stack([(w * row).sum(dim=-1) for row in x])


@dataclass(slots=True)
class _Slots:
    """The pairs of one module, by adapter slot, in the model's dtype and on its device."""

    pairs: dict[int, LoraPair] = field(default_factory=dict)

    def put(self, slot: int, pair: LoraPair, like: torch.Tensor) -> None:
        self.pairs[slot] = LoraPair(
            pair.A.to(device=like.device, dtype=like.dtype), pair.B.to(device=like.device, dtype=like.dtype), pair.scale
        )


class LoraLinear(nn.Module):
    """`base` with the adapters of the batch added. x [1, rows, in]; rows as numbered in the context."""

    def __init__(self, base: nn.Module, context: AdapterContext, *, is_head: bool, multiply: Multiply) -> None:
        super().__init__()
        self.base = base
        self.slots = _Slots()
        self._context = context
        self._is_head = is_head
        self._multiply = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        groups = self._context.head_rows if self._is_head else self._context.rows
        flat_x, flat_y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for group in groups:
            pair = self.slots.pairs.get(group.slot)
            if pair is not None:
                delta = self._multiply(self._multiply(flat_x[group.rows], pair.A) * pair.scale, pair.B)
                flat_y.index_add_(0, group.rows, delta)
        return y


class LoraEmbedding(nn.Module):
    """An embedding with A [r, vocab] and B [dim, r]: row += scale * B A[:, id]."""

    def __init__(self, base: nn.Module, context: AdapterContext, *, multiply: Multiply) -> None:
        super().__init__()
        self.base = base
        self.slots = _Slots()
        self._context = context
        self._multiply = multiply

    @property
    def weight(self) -> torch.Tensor:
        """Some models look at their embedding's weight."""
        weight = self.base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(ids)
        flat_ids, flat_y = ids.view(-1), y.view(-1, y.shape[-1])
        for group in self._context.rows:
            pair = self.slots.pairs.get(group.slot)
            if pair is not None:
                picked = pair.A[:, flat_ids[group.rows]].t()
                flat_y.index_add_(0, group.rows, self._multiply(picked * pair.scale, pair.B))
        return y


class AdapterModules:
    """Implements `lora.cache.SlotModules` over a transformers model. `adaptable`: paths of linear layers that see one
    row per token, and of the output head, which sees the wanted rows only.
    """

    def __init__(
        self,
        model: nn.Module,
        context: AdapterContext,
        *,
        token_linears: frozenset[str],
        head: str | None,
        embedding: str | None,
        dtype: torch.dtype,
        device: torch.device,
        multiply: Multiply = F.linear,
    ) -> None:
        self._model = model
        self._context = context
        self._token_linears = token_linears
        self._head = head
        self._embedding = embedding
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._multiply = multiply
        self._wrapped: dict[str, LoraLinear | LoraEmbedding] = {}

    def install(self, slot: int, weights: AdapterWeights) -> None:
        self._check(weights.pairs)
        for path, pair in weights.pairs.items():
            self._wrap(path).slots.put(slot, pair, self._like)

    def remove(self, slot: int) -> None:
        for module in self._wrapped.values():
            module.slots.pairs.pop(slot, None)

    def _check(self, pairs: Mapping[str, LoraPair]) -> None:
        for path in pairs:
            if path not in self._token_linears and path not in (self._head, self._embedding):
                raise AdapterRefused(f"The adapter changes {path!r}, which this engine does not adapt on this model.")

    def _wrap(self, path: str) -> LoraLinear | LoraEmbedding:
        wrapped = self._wrapped.get(path)
        if wrapped is None:
            base = self._model.get_submodule(path)
            if path == self._embedding:
                wrapped = LoraEmbedding(base, self._context, multiply=self._multiply)
            else:
                is_head = path == self._head
                wrapped = LoraLinear(base, self._context, is_head=is_head, multiply=self._multiply)
            self._model.set_submodule(path, wrapped)
            self._wrapped[path] = wrapped
        return wrapped
