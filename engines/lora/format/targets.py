"""What an adapter can change in a model: modules by path, with their shapes, and other names for parts of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TargetKind(StrEnum):
    """LINEAR: y += B A x. EMBEDDING: weight[id] += B A[:, id]. ROUTER: a module whose 2-D `weight` is used as a linear
    layer. EXPERTS: one 3-D parameter that holds the same linear layer of every expert.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    ROUTER = "router"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One place. `in_features` of an embedding is its vocabulary, `num_experts` is 0 unless EXPERTS."""

    kind: TargetKind
    in_features: int
    out_features: int
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class TargetPart:
    """Some outputs of a target, for which a checkpoint has a module of its own.

    `rows`: which outputs of the target. `source`: which outputs of the checkpoint's module; None for all of them.
    """

    path: str
    rows: slice
    source: slice | None = None


@dataclass(frozen=True, slots=True)
class ExpertParameters:
    """A module whose parameters are EXPERTS targets, in the order in which they are registered."""

    parameters: tuple[str, ...]
    num_experts: int


# Modules with 3-D parameters (experts, out, in) that do not say how they are laid out.
_KNOWN_EXPERTS: Final = frozenset({"InklingSharedExperts"})


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """Paths are those of `model.named_modules()`; an EXPERTS target is the parameter's, `….experts.down_proj`.

    `head`: the output head. `row_sums`: of the vocabulary matrices, to recognise a copy of them in a checkpoint; empty
    for a model on the meta device.
    """

    targets: Mapping[str, LoraTarget]
    parts: Mapping[str, tuple[TargetPart, ...]]
    experts: Mapping[str, ExpertParameters]
    head: str | None
    row_sums: Mapping[str, tuple[torch.dtype, torch.Tensor]]

    @property
    def max_tensors(self) -> int:
        """The most tensors that an adapter's file can have. Two for each place that a file may name, with experts one
        by one, and copies of the vocabulary matrices.
        """
        single = sum(self.targets[parts[0].path].num_experts for parts in self.parts.values())
        return 2 * (len(self.targets) + len(self.parts) + single) + 2

    @classmethod
    def of(cls, model: "PreTrainedModel") -> Self:
        """Of an unmodified transformers model, on any device."""
        head_module = model.get_output_embeddings()
        found = _Found({}, {}, {}, {})
        head = None
        for path, module in model.named_modules():
            found.add(path, module)
            if module is head_module:
                head = path
                found.add_row_sums(path, module)
        return cls(found.targets, found.parts, found.experts, head, found.row_sums)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the walk over the modules has found so far."""

    targets: dict[str, LoraTarget]
    parts: dict[str, tuple[TargetPart, ...]]
    experts: dict[str, ExpertParameters]
    row_sums: dict[str, tuple[torch.dtype, torch.Tensor]]

    def add(self, path: str, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            self.targets[path] = LoraTarget(TargetKind.LINEAR, module.in_features, module.out_features)
        elif isinstance(module, nn.Embedding):
            self.targets[path] = LoraTarget(TargetKind.EMBEDDING, module.num_embeddings, module.embedding_dim)
            self.add_row_sums(path, module)
        else:
            self._add_parameters(path, module)
            self._add_parts(path, module)

    def add_row_sums(self, path: str, module: nn.Module) -> None:
        weight = module.weight
        if isinstance(weight, torch.Tensor) and type(weight.data) is torch.Tensor and not weight.is_meta:
            self.row_sums[path] = (weight.dtype, row_sums(weight.detach()))

    def _add_parameters(self, path: str, module: nn.Module) -> None:
        own = dict(module.named_parameters(recurse=False))
        weight = own.get("weight")
        if weight is not None and weight.ndim == 2 and not any(module.children()):
            self.targets[path] = LoraTarget(TargetKind.ROUTER, weight.shape[1], weight.shape[0])
            return
        stacks = {name: parameter.shape for name, parameter in own.items() if parameter.ndim == 3}
        layout = vars(module)
        if stacks and ("is_transposed" in layout or type(module).__name__ in _KNOWN_EXPERTS):
            transposed = bool(layout.get("is_transposed"))
            for name, (count, rows, columns) in stacks.items():
                inputs, outputs = (rows, columns) if transposed else (columns, rows)
                self.targets[f"{path}.{name}"] = LoraTarget(TargetKind.EXPERTS, inputs, outputs, count)
            self.experts[path] = ExpertParameters(tuple(stacks), next(iter(stacks.values()))[0])
            self.parts.update(_expert_parts(path, stacks, self.targets, bool(layout.get("is_concatenated", True))))

    def _add_parts(self, path: str, module: nn.Module) -> None:
        linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        for name, part in _split_projections(path, module, linears):
            self.parts[f"{path}.{name}"] = (part,)
        gate, up = linears.get("gate_proj"), linears.get("up_proj")
        if gate is not None and up is not None and "gate_up_proj" not in linears:
            middle, end = gate.out_features, gate.out_features + up.out_features
            self.parts[f"{path}.gate_up_proj"] = (
                TargetPart(f"{path}.gate_proj", slice(0, middle), slice(0, middle)),
                TargetPart(f"{path}.up_proj", slice(0, end - middle), slice(middle, end)),
            )


def _expert_parts(
    path: str, stacks: Mapping[str, torch.Size], targets: Mapping[str, LoraTarget], is_concatenated: bool
) -> Iterator[tuple[str, tuple[TargetPart, ...]]]:
    """Names of the single projections, and `w1`, `w2`, `w3` for gate, down and up (without a gate, w1 is up)."""
    names = {name: TargetPart(f"{path}.{name}", slice(0, targets[f"{path}.{name}"].out_features)) for name in stacks}
    if "gate_up_proj" in names:
        width = names.pop("gate_up_proj").rows.stop
        gate, up = (0, width // 2, 1), (width // 2, width, 1)
        if not is_concatenated:
            gate, up = (0, width, 2), (1, width, 2)
        names["gate_proj"] = TargetPart(f"{path}.gate_up_proj", slice(*gate))
        names["up_proj"] = TargetPart(f"{path}.gate_up_proj", slice(*up))
    short = {"w1": "gate_proj" if "gate_proj" in names else "up_proj", "w2": "down_proj", "w3": "up_proj"}
    if short["w1"] == "up_proj":
        del short["w3"]
    for name, part in names.items():
        yield f"{path}.{name}", (part,)
    for name, full in short.items():
        if full in names:
            yield f"{path}.{name}", (names[full],)


def _split_projections(
    path: str, module: nn.Module, linears: Mapping[str, nn.Linear]
) -> Iterator[tuple[str, TargetPart]]:
    """Projections that the model fuses and some checkpoints keep apart, in gated delta nets and Mamba layers."""
    sizes = vars(module)
    match linears, sizes:
        case {"in_proj_qkv": fused}, {"key_dim": int(key), "value_dim": int(value)}:
            if fused.out_features == 2 * key + value:
                yield "in_proj_q", TargetPart(f"{path}.in_proj_qkv", slice(0, key))
                yield "in_proj_k", TargetPart(f"{path}.in_proj_qkv", slice(key, 2 * key))
                yield "in_proj_v", TargetPart(f"{path}.in_proj_qkv", slice(2 * key, 2 * key + value))
        case {"in_proj": fused}, {"intermediate_size": int(width), "conv_dim": int(convolved)}:
            if fused.out_features >= width + convolved:
                yield "gate_proj", TargetPart(f"{path}.in_proj", slice(0, width))
                yield "x_proj", TargetPart(f"{path}.in_proj", slice(width, 2 * width))


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """A checksum per row [rows] that is exact in any order: the sum of the bit patterns as integers."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return weight.contiguous().view(integers).sum(dim=-1, dtype=torch.int64).cpu()
