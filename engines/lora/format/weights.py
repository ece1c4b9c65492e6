"""A LoRA adapter in PEFT's format, read once, checked, and bound to the modules of a model.

The files are read into memory, hashed, and parsed from those same bytes, so the served content is that of the digest.
Nothing is unpickled or fetched. Expressions from the file are matched in bounded time (`patterns`). Every tensor of the
file is applied, or the adapter is refused.

An all-linear rank-8 adapter of a 30-layer model (420 tensors, 4.9 MB) takes 16 ms of one core of a Xeon (model 207,
AMX). A quarter of that is hashing: tests/bench/read_adapter.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engines.interface.errors import AdapterChanged, AdapterRefused
from engines.interface.protocol import Adapter
from engines.lora.format.digest import WEIGHTS_FILE, adapter_digest
from engines.lora.format.files import read_files
from engines.lora.format.names import Role, TensorName, parse_name
from engines.lora.format.pairs import FilePair, LoraPair, PairBuilder, is_finite
from engines.lora.format.peft_config import parse_config
from engines.lora.format.targets import LoraTargets, TargetKind, row_sums
from engines.lora.format.tensor_file import TensorEntry, TensorFile, TensorFileError, parse_header, printable

__all__ = ["AdapterWeights", "LoraPair", "LoraTargets", "read_adapter"]

_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """`pairs` by path, as in `LoraTargets.targets`. `nbytes`: of all of them, in memory.

    `rank`: the largest. Where the model fuses modules that the file keeps apart, it is the sum of the parts.
    """

    digest: str
    rank: int
    nbytes: int
    pairs: Mapping[str, LoraPair]


def read_adapter(adapter: Adapter, targets: LoraTargets, *, max_rank: int, max_bytes: int) -> AdapterWeights:
    """`max_rank` holds for each matrix of the file, `max_bytes` for the weights file.

    Blocks on the disk; safe on any thread.

    - Raises `AdapterChanged` when the directory does not hold the content with the adapter's digest.
    - Raises `AdapterUnavailable` when it cannot be read.
    - Raises `AdapterRefused` when the content cannot be applied exactly. The message names file, field or tensor.
    """
    config_bytes, weights = read_files(adapter.directory, max_bytes)
    if adapter_digest(config_bytes, weights) != adapter.digest:
        raise AdapterChanged("The checkpoint's files changed while they were being loaded.")
    config = parse_config(config_bytes)
    header = _header(weights, targets.max_tensors)
    tensors = _tensors(weights, header)
    builder = PairBuilder(targets, config, max_rank)
    for pair in _pairs(tensors, builder, targets):
        builder.add(pair)
    pairs = builder.build()
    if not pairs:
        raise _refused("it holds no LoRA tensors.")
    rank = max(pair.A.shape[-2] for pair in pairs.values())
    nbytes = sum(matrix.nbytes for pair in pairs.values() for matrix in (pair.A, pair.B))
    return AdapterWeights(adapter.digest, rank, nbytes, pairs)


def _refused(message: str) -> AdapterRefused:
    return AdapterRefused(f"{WEIGHTS_FILE}: {message}")


def _header(weights: bytearray, max_tensors: int) -> TensorFile:
    try:
        header = parse_header(memoryview(weights), max_tensors)
    except TensorFileError as exc:
        raise _refused(str(exc)) from exc
    if header.extent != len(weights):
        raise _refused(f"it has {len(weights)} bytes, and its header describes {header.extent}.")
    return header


def _tensors(weights: bytearray, header: TensorFile) -> dict[str, Tensor]:
    """Views of the file's bytes."""
    tensors = {name: _tensor(weights, name, entry) for name, entry in header.tensors.items()}
    _check_finite(weights, header, tensors)
    return tensors


def _tensor(weights: bytearray, name: str, entry: TensorEntry) -> Tensor:
    if entry.dtype not in _DTYPES:
        raise _refused(f"{printable(name)} has dtype {entry.dtype}; it must be one of {', '.join(_DTYPES)}.")
    dtype = _DTYPES[entry.dtype]
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    if entry.start % dtype.itemsize:  # rare: most writers pad the header
        aligned = weights[entry.start : entry.end]
        return torch.frombuffer(aligned, dtype=dtype).view(entry.shape)
    count = (entry.end - entry.start) // dtype.itemsize
    return torch.frombuffer(weights, dtype=dtype, count=count, offset=entry.start).view(entry.shape)


def _check_finite(weights: bytearray, header: TensorFile, tensors: Mapping[str, Tensor]) -> None:
    """One such value would reach the whole batch: NaN times the zero of another request's row is NaN."""
    start = min((entry.start for entry in header.tensors.values()), default=0)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1 and start < len(weights):
        dtype = dtypes.pop()
        if start % dtype.itemsize == 0 and is_finite(torch.frombuffer(weights, dtype=dtype, offset=start)):
            return
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise _refused(f"{printable(name)} holds NaN or infinity.")


def _pairs(tensors: Mapping[str, Tensor], builder: PairBuilder, targets: LoraTargets) -> Iterator[FilePair]:
    """Tensors by module, each A with its B."""
    halves = dict[tuple[str, int, bool], dict[Role, Tensor]]()
    for name, tensor in tensors.items():
        parsed = parse_name(name)
        if parsed is None:
            raise _refused(f"{printable(name)} is not a tensor of a LoRA adapter that can be applied here.")
        if parsed.role is Role.BASE:
            _check_copy(name, parsed, tensor, builder, targets)
            continue
        is_embedding = parsed.role in (Role.EMBEDDING_A, Role.EMBEDDING_B)
        module = halves.setdefault((parsed.path, parsed.depth, is_embedding), {})
        if parsed.role in module:
            raise _refused(f"{printable(name)} occurs twice, with and without a prefix.")
        module[parsed.role] = tensor
    for (path, depth, is_embedding), module in halves.items():
        A, B = (Role.EMBEDDING_A, Role.EMBEDDING_B) if is_embedding else (Role.A, Role.B)
        if A not in module or B not in module:
            raise _refused(f"{printable(path)} has {next(iter(module))} without the other matrix.")
        yield FilePair(path, depth, is_embedding, module[A], module[B])


def _check_copy(name: str, parsed: TensorName, tensor: Tensor, builder: PairBuilder, targets: LoraTargets) -> None:
    """PEFT stores the base's own vocabulary matrix beside an adapter of it. It must be the base's, to the bit."""
    path = builder.resolver.resolve(parsed.path)
    target = targets.targets.get(path or "")
    if path is None or target is None or (target.kind is not TargetKind.EMBEDDING and path != targets.head):
        raise _refused(f"{printable(name)} is not a vocabulary matrix of the base model.")
    rows, columns = target.in_features, target.out_features
    if path == targets.head:
        rows, columns = columns, rows
    if tensor.shape != (rows, columns):
        raise _refused(
            f"{printable(name)} has shape {list(tensor.shape)}, the base model's {[rows, columns]}: a resized "
            "vocabulary is not supported."
        )
    if path in targets.row_sums:
        dtype, sums = targets.row_sums[path]
        if not torch.equal(row_sums(tensor.to(dtype)), sums):
            raise _refused(f"{printable(name)} differs from the base model's; changed base weights are not supported.")
