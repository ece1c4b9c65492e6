"""Layers that carry a state from token to token (gated delta nets, short convolutions) in a ragged batch.

transformers' own layer computes. It is called once for all one-token rows, with their states stacked, and once for each
longer chunk. A stand-in for transformers' cache holds those states. In a single call the layer would take the batch for
one sequence, in some models without an error.

A state is kept under its position. So running a chunk again starts from the same state, and the state of an uncommitted
forward is never used.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engines.attention.interface import Paged
from engines.interface.errors import ModelRefused
from engines.planning.scheduler import Chunk
from engines.planning.sequence import TokenSequence

LAYER_TYPES = frozenset({"linear_attention", "conv"})
"""What configurations call these layers."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer of one sequence: tensors [1, ...] by kind and index, as transformers numbers them."""

    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for kind in (self.conv, self.recurrent) for tensor in kind.values())


@dataclass(slots=True)
class _StackedCache:
    """Has the interface of transformers' cache, for one layer whose batch is `states`. A state is None before the first
    token.
    """

    states: list[LayerState] | None
    conv: dict[int, torch.Tensor] = field(default_factory=dict)
    recurrent: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copies: the layers update what they get in place.
        if self.states:
            for index in self.states[0].conv:
                self.conv[index] = torch.cat([state.conv[index] for state in self.states])
            for index in self.states[0].recurrent:
                self.recurrent[index] = torch.cat([state.recurrent[index] for state in self.states])

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.states is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.states is not None)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **others: Any
    ) -> torch.Tensor:
        """Keeps the last `conv_kernel_size` inputs; returns them with the new ones, to be convolved."""
        old = self.conv.get(state_idx)
        whole = conv_states if old is None else torch.cat([old, conv_states], dim=-1)
        kept = F.pad(whole, (max(0, conv_kernel_size - whole.shape[-1]), 0))
        self.conv[state_idx] = kept[..., -conv_kernel_size:].contiguous()
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> torch.Tensor:
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states

    def split(self) -> list[LayerState]:
        """The states after the forward, one for each sequence. Copies, so that none holds the others' memory."""
        kinds = (self.conv, self.recurrent)
        count = next(iter(next(filter(None, kinds)).values())).shape[0]
        return [
            LayerState(*({i: tensor[n : n + 1].clone() for i, tensor in kind.items()} for kind in kinds))
            for n in range(count)
        ]


Narrow = Callable[[torch.Tensor], AbstractContextManager[None]]
"""Tells other readers of the rows that the batch is only some of its rows for a while."""


def split_by_sequence(model: Any, text_config: Any, narrow: Narrow) -> int:
    """Wrap every layer with a state; returns how many. Raises `ModelRefused` where the layer is not found."""
    types = getattr(text_config, "layer_types", None) or []
    wrapped = 0
    for layer, kind in zip(model.get_decoder().layers, types, strict=False):
        if kind in LAYER_TYPES:
            modules = [child for child in layer.children() if hasattr(child, "layer_idx")]
            if len(modules) != 1:
                raise ModelRefused(f"{text_config.model_type}: no single module computes its {kind!r} layers.")
            _wrap(modules[0], narrow)
            wrapped += 1
    return wrapped


def state_bytes(sequence: TokenSequence) -> int:
    """Bytes of all states of a sequence that has run; two positions are kept while a chunk is being computed."""
    layers: list[list[LayerState]] = [list(states.values()) for states in sequence.states.values()]
    return 2 * sum(max(state.nbytes for state in states) for states in layers)


def _wrap(module: nn.Module, narrow: Narrow) -> None:
    original: Callable[..., torch.Tensor] = module.forward
    layer: Any = module.layer_idx

    def forward(
        hidden_states: torch.Tensor, paged: Paged, cache: None = None, attention_mask: None = None, **others: Any
    ) -> torch.Tensor:
        """hidden_states [1, T, hidden] -> the same"""
        if attention_mask is not None:
            raise ModelRefused(f"{type(module).__name__} was given a mask, which this engine does not support.")
        out = torch.zeros_like(hidden_states)

        def run(chunks: Sequence[Chunk], rows: torch.Tensor, *, length: int) -> None:
            """Rows [sequences * length] of sequences that are all at their beginning, or all beyond it."""
            started = chunks[0].start > 0
            stacked = _StackedCache(
                [chunk.sequence.states[layer][chunk.start] for chunk in chunks] if started else None
            )
            x = hidden_states[0, rows].view(len(chunks), length, -1)
            with narrow(rows):
                y = original(hidden_states=x, cache=stacked, attention_mask=None, **others)
            out[0, rows] = y.reshape(len(chunks) * length, -1)
            for chunk, state in zip(chunks, stacked.split(), strict=True):
                before = chunk.sequence.states.get(layer, {})
                kept = {chunk.start: before[chunk.start]} if started else {}
                chunk.sequence.states[layer] = {**kept, chunk.end: state}

        for chunks, rows, length in _groups(paged.batch.chunks):
            run(chunks, torch.tensor(rows, device=hidden_states.device), length=length)
        return out

    module.forward = forward


def _groups(chunks: Sequence[Chunk]) -> list[tuple[list[Chunk], list[int], int]]:
    """The calls of a step: (chunks, their rows, tokens of each). One-token rows that have a state are one call, those
    without a state another. Every longer chunk is a call of its own.
    """
    groups: list[tuple[list[Chunk], list[int], int]] = []
    single: dict[bool, tuple[list[Chunk], list[int]]] = {}
    row = 0
    for chunk in chunks:
        if chunk.length == 1:
            members, rows = single.setdefault(chunk.start > 0, ([], []))
            members.append(chunk)
            rows.append(row)
        else:
            groups.append(([chunk], list(range(row, row + chunk.length)), chunk.length))
        row += chunk.length
    return [(members, rows, 1) for members, rows in single.values()] + groups
