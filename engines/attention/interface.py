"""Our entry in transformers' attention interface: a model that looks its attention function up there runs on the paged
KV cache without a change.

No mask function is registered under the same name, so transformers builds no mask: it returns early for backends that
bring their own. Whatever a model would say through a mask must be said by an argument that we know. Unknown arguments
are refused by name. Ignoring one (the `indices` of a sparse attention, say) would compute something else silently.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.interface.errors import ModelRefused
from engines.tensors.batch import StepBatch
from engines.tensors.kv_cache import LayerShape

NAME = "roundhouse_paged"

_WITHOUT_MEANING = frozenset(
    {"position_ids", "use_cache", "cache", "output_attentions", "output_router_logits", "is_causal"}
)
"""Arguments that models pass on and that change nothing for a causal decoder without a mask."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What one layer asks for. `window` None: all earlier tokens; else the last `window`, itself included.

    `softcap`: a score becomes softcap * tanh(score / softcap). `sinks` [heads]: extra scores in the softmax that have
    no value.
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Writes the new K and V into the cache and attends: q [T, heads, k_dim], k [T, kv_heads, k_dim],
    v [T, kv_heads, v_dim] -> [T, heads, v_dim].
    """

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention, batch: StepBatch
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class Paged:
    """Travels through the model's forward as the keyword argument `paged`."""

    backend: AttentionBackend
    batch: StepBatch


class ShapeProbe:
    """A backend that only records the layers' shapes and attention arguments. Its output is zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.attention: dict[int, Attention] = {}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention, batch: StepBatch
    ) -> torch.Tensor:
        self.attention[attention.layer] = attention
        self.shapes[attention.layer] = LayerShape(k.shape[1], k.shape[2], v.shape[2], k.dtype)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: Paged | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, k_dim], key [1, kv_heads, T, k_dim], value [1, kv_heads, T, v_dim] -> [1, T, heads, v_dim].

    Raises `ModelRefused` for a mask or an argument that this engine does not know.
    """
    assert paged is not None, "a model with paged attention was run outside of the engine"
    unknown = sorted(name for name in others.keys() - _WITHOUT_MEANING if others[name] is not None)
    if unknown or attention_mask is not None:
        what = "an attention mask" if attention_mask is not None else f"the attention argument {unknown[0]!r}"
        raise ModelRefused(f"{type(module).__name__} passes {what}, which this engine does not support.")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelRefused(f"{type(module).__name__} attends in both directions; this engine serves causal models.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    attention = Attention(layer, scale, sliding_window, softcap, s_aux)
    return paged.backend.attend(q, k, v, attention, paged.batch).unsqueeze(0), None


def register() -> None:
    """Make the name known to transformers; repeating it changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
