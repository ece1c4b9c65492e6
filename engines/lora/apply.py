"""Adapters applied to a running model: wrappers around its modules, many adapters in one batch.

This is the reference for every faster way: for each adapter in the batch, y[rows] += B (A x[rows] * scale). Ranks are
never padded. Modules that no loaded adapter changes are not wrapped, so loaded but unused adapters cost nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from engines.interface.errors import AdapterRefused
from engines.lora.adaptable import lookup_scale
from engines.lora.context import AdapterContext, AdapterRows
from engines.lora.experts import AdaptedExperts
from engines.lora.format.pairs import LoraPair
from engines.lora.format.targets import TargetKind
from engines.lora.format.weights import AdapterWeights
from engines.lora.shards import Shards, SumUp

Pairs = dict[int, LoraPair]
"""Those of one module by adapter slot, in the model's dtype and on its device."""


def add_pairs(
    y: torch.Tensor, x: torch.Tensor, pairs: Pairs, groups: Sequence[AdapterRows], sum_up: SumUp | None = None
) -> torch.Tensor:
    """y [..., out] += scale * B A x [..., in] in the rows that have an adapter here; with `sum_up`, x and A are a part
    of all inputs.
    """
    flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    for group in groups:
        pair = pairs.get(group.slot)
        if pair is not None:
            narrow = F.linear(flat_x[group.rows].to(pair.A.dtype), pair.A)
            if sum_up is not None:
                sum_up(narrow)
            narrow *= pair.scale
            flat_y.index_add_(0, group.rows, F.linear(narrow, pair.B).to(y.dtype))
    return y


class _Wrapper(nn.Module):
    """Replaces `base` in the model. Attributes of `base` can be read through it, since some models do."""

    def __init__(self, base: nn.Module, context: AdapterContext) -> None:
        super().__init__()
        self.base = base
        self.pairs: Pairs = {}
        self._context = context

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


AddByRow = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(y [..., out], x [..., in], slots [T], `AdapterContext.tiles`) -> y, with each row's adapter added to it."""


class LoraLinear(_Wrapper):
    """x [1, rows, in] -> [1, rows, out]. Rows are numbered as in the context; those of the output head separately.

    `by_row`: adds the adapters while `AdapterContext.by_row` is set.
    """

    by_row: AddByRow | None = None

    def __init__(self, base: nn.Module, context: AdapterContext, *, is_head: bool, sum_up: SumUp | None = None) -> None:
        super().__init__(base, context)
        self._is_head = is_head
        self._sum_up = sum_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        if self._context.by_row:
            slots = self._context.head_slots if self._is_head else self._context.slots
            if slots is None or self.by_row is None:
                return y
            return self.by_row(y, x, slots, None if self._is_head else self._context.tiles)
        groups = self._context.head_rows if self._is_head else self._context.rows
        return add_pairs(y, x, self.pairs, groups, self._sum_up)


class LoraEmbedding(_Wrapper):
    """An embedding with A [r, vocab] and B [dim, r]: row += scale * B A[:, id], times the embedding's own factor."""

    def __init__(self, base: nn.Module, context: AdapterContext) -> None:
        super().__init__(base, context)
        factor = lookup_scale(base)
        assert factor is not None, "what is adaptable looks rows up"
        self._factor = factor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(ids)
        flat_ids, flat_y = ids.view(-1), y.view(-1, y.shape[-1])
        for group in self._context.rows:
            pair = self.pairs.get(group.slot)
            if pair is not None:
                picked = pair.A[:, flat_ids[group.rows]].t()
                flat_y.index_add_(0, group.rows, F.linear(picked * pair.scale, pair.B).mul_(self._factor))
        return y


class LoraRouter(_Wrapper):
    """A module that uses its 2-D weight in one call of `F.linear` on the rows of the batch, and then does more."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not any(group.slot in self.pairs for group in self._context.rows):
            return self.base(*args, **kwargs)
        with _AddToLinear(self.pairs, self._context.rows):
            return self.base(*args, **kwargs)


class _AddToLinear(TorchFunctionMode):
    def __init__(self, pairs: Pairs, groups: Sequence[AdapterRows]) -> None:
        super().__init__()
        self._pairs = pairs
        self._groups = groups

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return add_pairs(result, args[0], self._pairs, self._groups) if func is F.linear else result


class AdapterModules:
    """Implements `lora.cache.SlotModules` over a transformers model.

    `adaptable`: modules (for experts: parameters) that see one row per token, with their kind. `head`: the output head,
    which sees only the wanted rows.
    """

    def __init__(
        self,
        model: nn.Module,
        context: AdapterContext,
        *,
        adaptable: Mapping[str, TargetKind],
        head: str | None,
        dtype: torch.dtype,
        device: torch.device,
        shards: Shards | None = None,
    ) -> None:
        self._model = model
        self._shards = shards
        self._context = context
        self._adaptable = adaptable
        self._head = head
        self._dtype = dtype
        self._device = device
        self._pairs: dict[str, Pairs] = {}

    def prepare(self, weights: AdapterWeights) -> AdapterWeights:
        """Converts to the model's dtype and device. Safe on any thread. Raises `AdapterRefused` for a module that
        cannot be adapted on this model, and for values beyond the dtype's range.
        """
        pairs: dict[str, LoraPair] = {}
        for path, pair in weights.pairs.items():
            if path not in self._adaptable:
                raise AdapterRefused(f"The adapter changes {path!r}, which this engine does not adapt on this model.")
            pairs[path] = pair.cast(path, self._dtype, self._device)
            if self._shards is not None:
                pairs[path] = self._shards.part_of(path, pairs[path])
        nbytes = sum(pair.A.nbytes + pair.B.nbytes for pair in pairs.values())
        return AdapterWeights(weights.digest, weights.rank, nbytes, pairs)

    def install(self, slot: int, adapter: AdapterWeights) -> None:
        for path, pair in adapter.pairs.items():
            if path not in self._pairs:
                self._pairs[path] = self._wrap(path)
            self._pairs[path][slot] = pair

    def remove(self, slot: int) -> None:
        for pairs in self._pairs.values():
            pairs.pop(slot, None)

    def wrap_linear(self, path: str) -> LoraLinear:
        """The wrapper of a linear layer; it is created if there is none."""
        base = self._model.get_submodule(path)
        if not isinstance(base, LoraLinear):
            base = LoraLinear(base, self._context, is_head=path == self._head, sum_up=self._sum_up(path))
            self._model.set_submodule(path, base)
        return base

    def _sum_up(self, path: str) -> SumUp | None:
        return None if self._shards is None else self._shards.sums_up(path)

    def _wrap(self, path: str) -> Pairs:
        kind = self._adaptable[path]
        if kind is TargetKind.EXPERTS:
            path, _, name = path.rpartition(".")
            return AdaptedExperts.around(self._model, path, self._context, sum_up=self._sum_up(path)).pairs[name]
        if kind is TargetKind.LINEAR:
            return self.wrap_linear(path).pairs
        base = self._model.get_submodule(path)
        is_embedding = kind is TargetKind.EMBEDDING
        wrapped = LoraEmbedding(base, self._context) if is_embedding else LoraRouter(base, self._context)
        self._model.set_submodule(path, wrapped)
        return wrapped.pairs
