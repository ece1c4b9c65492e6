"""Which part of a model, and of an adapter for it, one process of a tensor-parallel group holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from engines.errors import AdapterRefused, ModelRefused
from engines.lora.pairs import LoraPair

_COLUMNS, _ROWS = "colwise", "rowwise"
_WHOLE = frozenset({"colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"})
"""Styles whose input and output are whole on every process."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The part of process `rank` of `size`. `styles`: by module, as in transformers' plans, with `*` for numbers; what
    they do not name is whole on every process.
    """

    rank: int
    size: int
    styles: Mapping[str, str]

    @classmethod
    def of(cls, model: Any, rank: int, size: int) -> "Shards":
        """Raises `ModelRefused` where transformers' plan splits no layer, or the heads do not divide evenly."""
        styles, config = dict(model.tp_plan), model.config.get_text_config()
        if not {_COLUMNS, _ROWS} & set(styles.values()):
            raise ModelRefused(
                f"{config.model_type}: transformers has no plan to spread its layers over {size} devices."
            )
        for name in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, name, None) or config.num_attention_heads
            if count % size:
                raise ModelRefused(f"tensor_parallel = {size} does not divide {name} = {count} of {config.model_type}.")
        return cls(rank, size, styles)

    def in_features(self, path: str, whole: int) -> int:
        """How many of a module's inputs come to this process."""
        return len(range(whole)[self._part(whole)]) if self._style(path) == _ROWS else whole

    def part_of(self, path: str, pair: LoraPair) -> LoraPair:
        """Of an adapter's matrices: where a module's outputs are split the rows of B, where its inputs are split the
        columns of A. Raises `AdapterRefused` where the model is split in another way, as experts are.
        """
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            style = self._style(".".join(parts[:end]))
            if style is not None and style not in (_COLUMNS, _ROWS, *_WHOLE):
                raise AdapterRefused(
                    f"The adapter changes {path!r}, which is split over devices by {style!r}: no adapter can follow it."
                )
        style = self._style(path)
        if style == _COLUMNS:
            return LoraPair(pair.A, pair.B[self._part(pair.B.shape[0])].clone(), pair.scale)
        if style == _ROWS:
            return LoraPair(pair.A[:, self._part(pair.A.shape[1])].clone(), pair.B, pair.scale)
        return pair

    def sums_up(self, path: str) -> Callable[[torch.Tensor], object] | None:
        """What adds up A x over all processes, each of which has a part of x; None where x is whole."""
        return dist.all_reduce if self._style(path) == _ROWS else None

    def _style(self, path: str) -> str | None:
        return self.styles.get(replace_layer_number_by_wildcard(path))

    def _part(self, whole: int) -> slice:
        """As torch distributes a dimension: the last parts may be shorter."""
        share = -(-whole // self.size)
        return slice(self.rank * share, (self.rank + 1) * share)
