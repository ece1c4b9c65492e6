"""From pairs of matrices as a file holds them to one pair per place in the model."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engines.interface.errors import AdapterRefused
from engines.lora.format.digest import WEIGHTS_FILE
from engines.lora.format.names import Resolver
from engines.lora.format.peft_config import PeftConfig, refused
from engines.lora.format.targets import LoraTarget, LoraTargets, TargetKind, TargetPart
from engines.lora.format.tensor_file import printable

_ONE_EXPERT: Final = re.compile(r"(?P<module>.+\.experts)\.(?P<index>\d{1,6})\.(?P<projection>[^.]+)")


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """y += scale * B (A x), in the file's dtype.

    A [rank, in], B [out, rank]. Of an embedding: A [rank, vocabulary], B [dim, rank]. Of EXPERTS: A [experts, rank,
    in], B [experts, out, rank], where 1 in place of `experts` means that all share the matrix.

    The scale is kept apart to stay exact. Multiplied into a bfloat16 B, it would round every element by up to 0.4 %,
    unless it is a power of two.
    """

    A: Tensor
    B: Tensor
    scale: float

    def cast(self, path: str, dtype: torch.dtype, device: torch.device) -> "LoraPair":
        """A copy. Raises `AdapterRefused` when a value is beyond the dtype's range. It would become an infinity, and so
        would every reply that the adapter affects.
        """
        A, B = (matrix.to(device=device, dtype=dtype, copy=True) for matrix in (self.A, self.B))
        narrower = torch.finfo(dtype).max < max(torch.finfo(self.A.dtype).max, torch.finfo(self.B.dtype).max)
        if narrower and not (is_finite(A) and is_finite(B)):
            raise AdapterRefused(
                f"The adapter's matrices for {printable(path)} hold values over {torch.finfo(dtype).max:.3g}, the "
                f"largest of the model's {str(dtype).removeprefix('torch.')}."
            )
        return LoraPair(A, B, self.scale)


def is_finite(tensor: Tensor) -> bool:
    """One pass, 20 times as fast as `isfinite`: NaN is both the minimum and the maximum of a tensor that holds one."""
    if not tensor.numel():
        return True
    least, greatest = torch.aminmax(tensor)
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


@dataclass(frozen=True, slots=True, eq=False)
class FilePair:
    """A and B as the file has them. `path`, `depth`: as in `names.TensorName`."""

    path: str
    depth: int
    is_embedding: bool
    A: Tensor
    B: Tensor

    @property
    def is_empty(self) -> bool:
        """What another exporter writes for a projection that the model does not have."""
        return self.A.ndim == self.B.ndim == 3 and not self.A.numel() and not self.B.numel()


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A pair for some outputs of a target."""

    pair: LoraPair
    rows: slice


class PairBuilder:
    """Collects the pairs of one file. `add` and `build` raise `AdapterRefused` that names the tensor or field."""

    def __init__(self, targets: LoraTargets, config: PeftConfig, max_rank: int) -> None:
        self.resolver = Resolver(targets)
        self._targets = targets
        self._config = config
        self._max_rank = max_rank
        self._placed: dict[str, list[_Placed]] = {}
        self._single_experts: dict[str, dict[int, FilePair]] = {}

    def add(self, pair: FilePair) -> None:
        path = self.resolver.resolve(pair.path)
        if pair.is_empty:
            return
        if any(matrix.ndim not in (2, 3) or not matrix.numel() for matrix in (pair.A, pair.B)):
            raise _refused(
                pair, f"has the shapes {list(pair.A.shape)} and {list(pair.B.shape)}, which are not matrices"
            )
        if path is not None and path in self._targets.experts:
            self._add_parameter(pair, path)
        elif pair.depth:
            raise _refused(pair, "has nested wrappers, which only parameters of experts can have")
        elif path is not None:
            self._add_module(pair, path)
        elif match := _ONE_EXPERT.fullmatch(pair.path):
            self._add_single_expert(pair, match)
        else:
            raise _refused(pair, "is not a module of the base model")

    def build(self) -> dict[str, LoraPair]:
        for path, experts in self._single_experts.items():
            self._stack_single_experts(path, experts)
        return {path: self._combined(path, placed) for path, placed in self._placed.items()}

    def _add_module(self, pair: FilePair, path: str) -> None:
        parts = self._parts(path)
        kind = self._targets.targets[parts[0].path].kind
        if pair.is_embedding is not (kind is TargetKind.EMBEDDING):
            raise _refused(pair, f"has tensors of another kind than the base model's {kind} layer takes")
        self._check_named(pair, path, kind)
        names = (path, pair.path)
        if self._config.names_parameter(f"{path}.weight"):
            names = (f"{path}.weight", f"{pair.path}.weight")  # what PEFT's patterns are matched against then
        rank, scale = self._config.rank_and_scale(*names)
        if kind is TargetKind.EXPERTS:
            A, B = self._expert_matrices(pair, parts[0])
        else:
            A, B = pair.A, pair.B
            if A.ndim != 2 or A.shape[0] != rank:
                raise _refused(pair, f"has lora_A of shape {list(A.shape)}, the configuration says rank {rank}")
        if sum(_length(part.source) for part in parts if part.source) not in (0, B.shape[0]):
            raise _refused(pair, f"has lora_B of shape {list(B.shape)}, which {len(parts)} modules do not share evenly")
        for part in parts:
            self._place(pair, part, LoraPair(A, B if part.source is None else B[part.source], scale))

    def _parts(self, path: str) -> Sequence[TargetPart]:
        if path in self._targets.parts:
            return self._targets.parts[path]
        return (TargetPart(path, slice(0, self._targets.targets[path].out_features)),)

    def _check_named(self, pair: FilePair, path: str, kind: TargetKind) -> None:
        """PEFT leaves out tensors that its configuration does not name. Names that it does not know are another
        exporter's, whose configuration does not follow its rules.
        """
        if self._config.ties_embeddings and (path == self._targets.head or kind is TargetKind.EMBEDDING):
            raise refused("ensure_weight_tying is not supported for an adapter of the embeddings or the output head.")
        if path not in self._targets.targets or path.rpartition(".")[2] != pair.path.rpartition(".")[2]:
            return
        if not self._config.names(path, pair.path) and not self._config.names_parameter(f"{path}.weight"):
            raise refused(f"it does not target {printable(pair.path)}, which has tensors in the file.")

    def _expert_matrices(self, pair: FilePair, part: TargetPart) -> tuple[Tensor, Tensor]:
        """A [experts or 1, rank, in] and B [experts or 1, out, rank]. The file has them in the 3-D format or in the 2-D
        one. In the 2-D format, experts that see every token are side by side as one wide layer.
        """
        target = self._targets.targets[part.path]
        A, B, count = pair.A, pair.B, target.num_experts
        if A.ndim == B.ndim == 2:
            if A.shape[1] == target.in_features:
                A = A.unsqueeze(0)
            elif A.shape[1] == count * target.in_features:
                A = A.view(A.shape[0], count, -1).transpose(0, 1)
            outputs = _length(part.rows)
            if B.shape[0] == outputs:
                B = B.unsqueeze(0)
            elif B.shape[0] == count * outputs:
                B = B.view(count, outputs, -1)
        return A, B

    def _add_parameter(self, pair: FilePair, path: str) -> None:
        """PEFT's own format for the parameters of experts: A [experts * rank, in], B [out, rank * experts]. The
        wrappers are nested; the parameter that is registered last has the outermost.
        """
        experts = self._targets.experts[path]
        named = [name for name in experts.parameters if self._names_parameter(f"{path}.{name}", pair)]
        if pair.depth >= len(named):
            raise refused(
                f"target_parameters does not name all parameters that {printable(pair.path)} has tensors for."
            )
        path = f"{path}.{named[-1 - pair.depth]}"
        target = self._targets.targets[path]
        rank, scale = self._config.rank_and_scale(path)
        rows = rank * target.num_experts
        if pair.A.ndim != 2 or pair.B.ndim != 2 or pair.A.shape[0] != rows or pair.B.shape[1] != rows:
            raise _refused(
                pair,
                f"has the shapes {list(pair.A.shape)} and {list(pair.B.shape)}; {target.num_experts} experts of rank "
                f"{rank} need {rows} rows and columns",
            )
        A = pair.A.view(target.num_experts, rank, -1)
        B = pair.B.view(-1, rank, target.num_experts).permute(2, 0, 1)
        self._place(pair, self._parts(path)[0], LoraPair(A, B, scale))

    def _names_parameter(self, path: str, pair: FilePair) -> bool:
        in_file = f"{pair.path}.{path.rpartition('.')[2]}"
        return self._config.names_parameter(path) or self._config.names_parameter(in_file)

    def _add_single_expert(self, pair: FilePair, match: re.Match[str]) -> None:
        """One expert of a file from before transformers 5 kept all experts in one parameter."""
        path = self.resolver.resolve(f"{match['module']}.{match['projection']}")
        if path is None or self._targets.targets[self._parts(path)[0].path].kind is not TargetKind.EXPERTS:
            raise _refused(pair, "is not a module of the base model")
        if not self._config.names(pair.path):
            raise refused(f"it does not target {printable(pair.path)}, which has tensors in the file.")
        self._single_experts.setdefault(path, {})[int(match["index"])] = pair

    def _stack_single_experts(self, path: str, experts: Mapping[int, FilePair]) -> None:
        part = self._parts(path)[0]
        count = self._targets.targets[part.path].num_experts
        pairs = [experts[index] for index in sorted(experts)]
        if sorted(experts) != list(range(count)):
            raise _refused(pairs[0], f"is one of {len(experts)} adapted experts; all {count} of them must be")
        rank, scale = self._config.rank_and_scale(pairs[0].path)
        for pair in pairs:
            if self._config.rank_and_scale(pair.path) != (rank, scale) or pair.A.shape[:1] != (rank,):
                raise _refused(pair, f"has another rank or scale than the other experts; all must have rank {rank}")
            if pair.A.shape != pairs[0].A.shape or pair.B.shape != pairs[0].B.shape or pair.A.ndim != 2:
                raise _refused(pair, f"has the shapes {list(pair.A.shape)} and {list(pair.B.shape)}")
        A, B = torch.stack([pair.A for pair in pairs]), torch.stack([pair.B for pair in pairs])
        self._place(pairs[0], part, LoraPair(A, B, scale))

    def _place(self, pair: FilePair, part: TargetPart, lora: LoraPair) -> None:
        target = self._targets.targets[part.path]
        leads = ([1], [target.num_experts]) if target.num_experts else ([],)
        A, B = list(lora.A.shape), list(lora.B.shape)
        fits = (
            A[:-2] in leads
            and B[:-2] in leads
            and A[-1:] == [target.in_features]
            and B[-2:-1] == [_length(part.rows)]
            and A[-2] == B[-1]
        )
        if not fits:
            raise _refused(
                pair,
                f"has the shapes {list(pair.A.shape)} and {list(pair.B.shape)}, which do not fit the base model's "
                f"{_described(target, part)}",
            )
        if A[-2] > self._max_rank:
            raise _refused(pair, f"has rank {A[-2]}; the limit is {self._max_rank}")
        placed = self._placed.setdefault(part.path, [])
        if any(_overlap(part.rows, other.rows) for other in placed):
            raise _refused(pair, f"adapts {part.path!r}, as another module in the file does")
        placed.append(_Placed(lora, part.rows))

    def _combined(self, path: str, placed: Sequence[_Placed]) -> LoraPair:
        """Parts of one module become one pair: ranks add up, B is zero where a part has no outputs."""
        width = self._targets.targets[path].out_features
        if len(placed) == 1 and _length(placed[0].rows) == width:
            return placed[0].pair
        pairs = [one.pair for one in placed]
        scale = max((pair.scale for pair in pairs), key=abs)
        matrices = [matrix for pair in pairs for matrix in (pair.A, pair.B)]
        lead = (max(matrix.shape[0] for matrix in matrices),) if matrices[0].ndim == 3 else ()
        dtype = functools.reduce(torch.promote_types, (matrix.dtype for matrix in matrices))
        if any(pair.scale != scale for pair in pairs):
            dtype = torch.promote_types(dtype, torch.float32)
        A = torch.cat([pair.A.to(dtype).expand(*lead, *pair.A.shape[-2:]) for pair in pairs], dim=-2)
        B = torch.zeros(*lead, width, A.shape[-2], dtype=dtype)
        column = 0
        for one in placed:
            rank = one.pair.A.shape[-2]
            factor = 1.0 if one.pair.scale == scale else one.pair.scale / scale
            B[..., one.rows, column : column + rank] = one.pair.B.to(dtype) * factor
            column += rank
        return LoraPair(A, B, scale)


def _refused(pair: FilePair, what: str) -> AdapterRefused:
    return AdapterRefused(f"{WEIGHTS_FILE}: {printable(pair.path)} {what}.")


def _length(rows: slice) -> int:
    return len(range(*rows.indices(rows.stop)))


def _overlap(first: slice, second: slice) -> bool:
    return not set(range(*first.indices(first.stop))).isdisjoint(range(*second.indices(second.stop)))


def _described(target: LoraTarget, part: TargetPart) -> str:
    experts = f" of {target.num_experts} experts" if target.num_experts else ""
    return f"{target.kind} layer{experts} with {target.in_features} inputs and {_length(part.rows)} outputs"
