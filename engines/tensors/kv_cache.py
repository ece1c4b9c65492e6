"""The memory that K and V of all sequences lie in, by layer and block."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.interface.errors import ModelRefused

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer: KV heads, head size of K and of V (they differ in MLA), dtype of the cached values."""

    num_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


class KVCache:
    """K [blocks, block_size, heads, k_dim] and V [blocks, block_size, heads, v_dim] of every layer.

    Block 0 is the trash block that padding rows write to.
    """

    def __init__(
        self, shapes: Mapping[int, LayerShape], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        for layer, shape in shapes.items():
            size = (num_blocks, block_size, shape.num_heads)
            self.k[layer] = torch.zeros(*size, shape.k_dim, dtype=shape.dtype, device=device)
            self.v[layer] = torch.zeros(*size, shape.v_dim, dtype=shape.dtype, device=device)

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, fresh_blocks: torch.Tensor | None
    ) -> None:
        """Put k [T, heads, k_dim] and v [T, heads, v_dim] into `slots` [T] (block * block_size + offset).

        `fresh_blocks` are zeroed first, for backends that read whole blocks, where the last owner's content remains. A
        masked score has no weight, but NaN times 0 is NaN.
        """
        for values, new in ((self.k[layer], k), (self.v[layer], v)):
            if fresh_blocks is not None:
                values.index_fill_(0, fresh_blocks, 0)
            values.view(-1, *values.shape[2:]).index_copy_(0, slots, new)


def blocks_for(
    shapes: Mapping[int, LayerShape], block_size: int, *, budget_bytes: int, context_length: int, max_running: int
) -> int:
    """How many blocks to allocate within the budget. Never more than all running sequences at full length need.

    Raises `ModelRefused` when not even one sequence of full length fits.
    """
    block_bytes = block_size * sum(shape.bytes_per_token for shape in shapes.values())
    if not block_bytes:
        return 2 + max_running * -(-context_length // block_size)
    per_sequence = -(-context_length // block_size)
    count = min(budget_bytes // block_bytes, 1 + per_sequence * max_running)
    if count < 1 + per_sequence:
        raise ModelRefused(
            f"kv_cache_bytes = {budget_bytes} holds {max(0, count - 1) * block_size} tokens, fewer than "
            f"context_length = {context_length}. Give at least {(1 + per_sequence) * block_bytes} bytes, or a "
            "smaller context_length."
        )
    logger.info(
        "kv cache: %d blocks of %d tokens, %.1f MiB, %d bytes per block",
        count,
        block_size,
        count * block_bytes / 2**20,
        block_bytes,
    )
    return count


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that could be allocated on the device now. On a CPU this respects the control group's limit, if there is
    one.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _field(root / "proc/meminfo", "MemAvailable:") * 1024
    for folder, limit_file, used_file, cached_field in _CGROUPS:
        try:
            limit = int((root / folder / limit_file).read_text())
            used = int((root / folder / used_file).read_text())
            # Cached file pages (the weights just read, say) count as used, but the kernel frees them on demand.
            used -= _field(root / folder / "memory.stat", cached_field)
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
        available = min(available, max(0, limit - used))
    return available


_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")
