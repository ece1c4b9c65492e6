"""Which part of a model, and of an adapter for it, a process of a tensor-parallel group holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from engines.interface.errors import AdapterRefused, ModelRefused
from engines.lora.format.pairs import LoraPair

_COLUMNS, _ROWS = "colwise", "rowwise"
_PACKED, _EXPERTS = "packed_colwise", "moe_tp_experts"
"""Two layers in one matrix, both split by their outputs; modules whose own parameters are split so, or by rows."""
_SPLIT = frozenset({_COLUMNS, _ROWS, _PACKED, _EXPERTS})
_WHOLE = frozenset({"colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"})
"""Styles whose input and output are whole on every process."""

SumUp = Callable[[torch.Tensor], object]
"""Adds a tensor up over all processes that have a part of it, in place."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The part of process `rank` of `size`. `styles`: by module, as in transformers' plans, with `*` for numbers. Other
    modules are whole on every process.
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
                f"tensor_parallel must be 1 for {config.model_type}, not {size}: transformers has no plan to split it."
            )
        for name in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, name, None) or config.num_attention_heads
            if count % size:
                raise ModelRefused(f"tensor_parallel = {size} does not divide {name} = {count} of {config.model_type}.")
        for path, module in model.named_modules():
            if styles.get(name := replace_layer_number_by_wildcard(path)) == _EXPERTS and not _adds_up(module):
                styles[name] = f"{_EXPERTS} of {type(module).__name__}"
        return cls(rank, size, styles)

    def in_features(self, path: str, whole: int) -> int:
        """How many of a module's inputs this process has."""
        return len(range(whole)[self._part(whole)]) if self._style(path) == _ROWS else whole

    def part_of(self, path: str, pair: LoraPair) -> LoraPair:
        """This process' part of an adapter's matrices, also of those of all experts. Where a module's outputs are
        split, the rows of B; where its inputs are split, the columns of A. Raises `AdapterRefused` where the model is
        split in another way.
        """
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            style = self._style(".".join(parts[:end]))
            if style is not None and style not in _SPLIT | _WHOLE:
                raise AdapterRefused(
                    f"The adapter changes {path!r}, which is split over devices by {style!r}. "
                    "Adapters of such layers are not supported."
                )
        style = self._style(path)
        if style in (_COLUMNS, _PACKED):
            layers = pair.B.chunk(2 if style == _PACKED else 1, dim=-2)
            own = [layer[..., self._part(layer.shape[-2]), :] for layer in layers]
            return LoraPair(pair.A, torch.cat(own, dim=-2), pair.scale)
        if style == _ROWS:
            return LoraPair(pair.A[..., self._part(pair.A.shape[-1])].clone(), pair.B, pair.scale)
        return pair

    def sums_up(self, path: str) -> SumUp | None:
        """The operation that sums over all processes what a part of x gives: A x of a linear layer, the outputs of
        experts. None where x is whole.
        """
        return dist.all_reduce if self._style(path) in (_ROWS, _EXPERTS) else None

    def _style(self, path: str) -> str | None:
        return self.styles.get(replace_layer_number_by_wildcard(path))

    def _part(self, whole: int) -> slice:
        """As torch distributes a dimension: the last parts may be shorter."""
        share = -(-whole // self.size)
        return slice(self.rank * share, (self.rank + 1) * share)


def _adds_up(experts: Any) -> bool:
    """Whether the outputs of parts of these experts add up to the whole, and the parts are cut like linear layers."""
    odd = ("is_transposed", "has_bias", "has_post_expert_norm")
    return not any(getattr(experts, name, False) for name in odd)
