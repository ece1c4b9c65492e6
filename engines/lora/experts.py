"""The experts of a mixture, expert after expert: for adapters that change them, and for the exact mode."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from engines.lora.context import AdapterContext
from engines.lora.format.pairs import LoraPair
from engines.lora.shards import SumUp


class AdaptedExperts(nn.Module):
    """Wraps experts that follow transformers' `use_experts_implementation`, which is faster and knows no adapters. That
    one is still used while no row of the batch has an adapter here, unless the rows are filled up.

    `pairs`: adapters by parameter and slot. `row_multiple`: rows of an expert are filled up to a multiple of it.
    `sum_up`: where each of several processes has a part of every expert, it adds up their outputs in place.
    """

    def __init__(
        self,
        base: nn.Module,
        context: AdapterContext,
        row_multiple: int,
        sum_up: SumUp | None,
    ) -> None:
        super().__init__()
        self.base: Any = base
        self.pairs: dict[str, dict[int, LoraPair]] = {
            name: {} for name, parameter in base.named_parameters(recurse=False) if parameter.dim() == 3
        }
        self._context = context
        self._row_multiple = row_multiple
        self._sum_up = sum_up

    @classmethod
    def around(
        cls,
        model: nn.Module,
        path: str,
        context: AdapterContext,
        *,
        row_multiple: int = 1,
        sum_up: SumUp | None = None,
    ) -> Self:
        """Wraps the module at this path of the model, unless it is wrapped already."""
        base = model.get_submodule(path)
        if isinstance(base, cls):
            return base
        wrapped = cls(base, context, row_multiple, sum_up)
        model.set_submodule(path, wrapped)
        return wrapped

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, hidden], top_k_index and top_k_weights [T, K] -> [T, hidden]"""
        if self._row_multiple == 1 and not self._has_adapters():
            plain: torch.Tensor = self.base(hidden_states, top_k_index, top_k_weights)
            return plain
        shares = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        for expert in sorted(set(top_k_index.flatten().tolist())):
            if expert < self.base.num_experts:  # beyond them: those of another device
                rows, places = torch.where(top_k_index == expert)
                out = self._expert(expert, hidden_states[rows], rows)
                shares[rows, places] = (out * top_k_weights[rows, places, None]).to(shares.dtype)
        total = shares[:, 0]
        for place in range(1, shares.shape[1]):  # not `sum`: its order may depend on the number of rows
            total = total + shares[:, place]
        if self._sum_up is not None:
            self._sum_up(total)
        return total

    def _has_adapters(self) -> bool:
        return any(group.slot in pairs for group in self._context.rows for pairs in self.pairs.values())

    def _expert(self, expert: int, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] are these `rows` of the batch."""
        x = F.pad(x, (0, 0, 0, -x.shape[0] % self._row_multiple))
        if self.base.has_gate:
            x = self.base._apply_gate(self._linear("gate_up_proj", expert, x, rows))
        else:
            x = self.base.act_fn(self._linear("up_proj", expert, x, rows))
        x = self._linear("down_proj", expert, x, rows)
        if self.base.has_post_expert_norm:
            x = self.base.post_expert_norm(x)
        return x[: rows.shape[0]]

    def _linear(self, name: str, expert: int, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        weight = _here(getattr(self.base, name))[expert]
        y = torch.matmul(x, weight) if self.base.is_transposed else F.linear(x, weight)
        if self.base.has_bias:
            y = y + getattr(self.base, f"{name}_bias")[expert]
        if self._context.slots is not None and self.pairs[name]:
            slots = self._context.slots[rows]
            for group in self._context.rows:
                pair = self.pairs[name].get(group.slot)
                if pair is not None:
                    own = torch.where(slots == group.slot)[0]
                    narrow = F.linear(x[own], _of(pair.A, expert)) * pair.scale
                    y.index_add_(0, own, F.linear(narrow, _of(pair.B, expert)))
        return y


def _here(weight: torch.Tensor) -> torch.Tensor:
    """This process' part of the parameter."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _of(matrices: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert's matrix of [experts, …], or the matrix that all share."""
    return matrices[expert if matrices.shape[0] > 1 else 0]
