"""Finds which of a model's targets can be adapted row by row, by watching the model run a few tokens.

The others are layers over images, experts that get rows in another order, routers that do not use `F.linear`, or
embeddings that normalise what they look up. An adapter on them would be computed wrongly without an error, so it is
refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from engines.lora.format.targets import LoraTargets, TargetKind
from engines.lora.shards import Shards


def adaptable_targets(
    model: nn.Module,
    targets: LoraTargets,
    *,
    run: Callable[[], object],
    num_tokens: int,
    shards: Shards | None = None,
) -> dict[str, TargetKind]:
    """Paths as in `LoraTargets`. `run` makes the model compute `num_tokens` tokens, and logits of one of them."""
    watch = _Watch(num_tokens)
    handles = []
    modules = dict(model.named_modules())
    for path, target in targets.targets.items():
        module = modules[path.rpartition(".")[0] if target.kind is TargetKind.EXPERTS else path]
        if target.kind is not TargetKind.EXPERTS or hasattr(module, "has_gate"):
            width = target.in_features if shards is None else shards.in_features(path, target.in_features)
            handles.append(module.register_forward_pre_hook(watch.entering(path, target.kind, width)))
            handles.append(module.register_forward_hook(watch.leaving))
    try:
        with watch:
            run()
    finally:
        for handle in handles:
            handle.remove()
    found = watch.found
    if targets.head is not None:
        found[targets.head] = TargetKind.LINEAR
    return found


def lookup_scale(embedding: nn.Module) -> torch.Tensor | float | None:
    """The factor of the rows that an embedding looks up. None if it does something else with them."""
    if type(embedding) is nn.Embedding:
        return 1.0
    # What PEFT goes by: a buffer or a number, in transformers' classes of this name.
    scale: torch.Tensor | float | None = getattr(embedding, "embed_scale", None)
    return scale if type(embedding).__name__.endswith("ScaledWordEmbedding") else None


class _Watch(TorchFunctionMode):
    """Records the modules that got one row per token, and how often each multiplied by a weight itself."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._within: list[str] = []
        self._kinds: dict[str, TargetKind] = {}
        self._products: dict[str, int] = {}

    @property
    def found(self) -> dict[str, TargetKind]:
        return {
            path: kind
            for path, kind in self._kinds.items()
            if kind is not TargetKind.ROUTER or self._products.get(path) == 1
        }

    def entering(self, path: str, kind: TargetKind, in_features: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        width = 1 if kind is TargetKind.EMBEDDING else in_features

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._within.append(path)
            x = args[0] if args else None
            is_embedding = kind is TargetKind.EMBEDDING
            if not isinstance(x, torch.Tensor) or x.is_floating_point() is is_embedding:
                return
            if is_embedding and lookup_scale(module) is None:
                return
            # The experts' other parameters have other widths; how many rows they get is what counts.
            is_row_per_token = x.dim() == 2 and x.shape[0] == self._num_tokens
            if x.numel() == self._num_tokens * width or (kind is TargetKind.EXPERTS and is_row_per_token):
                self._kinds[path] = kind

        return hook

    def leaving(self, module: nn.Module, args: object, output: object) -> None:
        self._within.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and self._within:
            self._products[self._within[-1]] = self._products.get(self._within[-1], 0) + 1
        return func(*args, **(kwargs or {}))
