"""Adapters row by row: tables of pointers on the device replace groups of rows on the host.

So a step's work has the same shape whichever adapters its rows have. A CUDA graph needs that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from engines.gpu.kernels import expand_kernel, expand_tiles_kernel, shrink_kernel, shrink_tiles_kernel
from engines.lora.apply import AdapterModules
from engines.lora.context import AdapterContext
from engines.lora.format.pairs import LoraPair
from engines.lora.format.targets import TargetKind
from engines.lora.format.weights import AdapterWeights
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SLOT
from engines.tensors.transfer import to_device

_BLOCK_R = 16
TILE_ROWS = 32


def tiles_of(chunks: Sequence[Chunk], device: torch.device) -> torch.Tensor:
    """[n, 2] int32: the first row and the number of rows of each tile, up to `TILE_ROWS` of a chunk with an adapter."""
    tiles, row = [], 0
    for chunk in chunks:
        if chunk.sequence.slot != NO_SLOT:
            ends = row + chunk.length
            tiles += [(first, min(TILE_ROWS, ends - first)) for first in range(row, ends, TILE_ROWS)]
        row += chunk.length
    return to_device(tiles, device, torch.int32).view(-1, 2)


def device_layout(pair: LoraPair) -> LoraPair:
    """The same pair as the kernels read it: 16 bytes at a time, B by its columns, which are long at any rank."""
    return LoraPair(_dense(pair.A), _dense(pair.B.mT).mT, pair.scale)


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    dense = matrix.contiguous()
    return dense if dense.data_ptr() % 16 == 0 else dense.clone()


@dataclass(frozen=True)
class _Kernels:
    """A pair of kernels, and how much of the inputs and of the outputs one program takes at a time."""

    shrink: Any
    expand: Any
    block_k: int
    block_o: int
    sizes: Mapping[str, int]


_BY_ROW = _Kernels(shrink_kernel, expand_kernel, 256, 128, {})
_BY_TILE = _Kernels(shrink_tiles_kernel, expand_tiles_kernel, 64, 64, {"ROWS": TILE_ROWS})


class SlotTables:
    """For each module and slot: the addresses of A and B, the rank (0: none) and the scale."""

    def __init__(self, num_modules: int, num_slots: int, max_rank: int, device: torch.device) -> None:
        self._device = device
        self._pointers = torch.zeros(num_modules, 2, num_slots, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(num_modules, num_slots, dtype=torch.int32, device=device)
        self._scales = torch.zeros(num_modules, num_slots, dtype=torch.float32, device=device)
        self._max_rank = -(-max_rank // _BLOCK_R) * _BLOCK_R
        self._held: dict[int, Mapping[int, LoraPair]] = {}  # what the pointers point to

    def put(self, slot: int, pairs: Mapping[int, LoraPair]) -> None:
        """The pairs of one adapter by the module's number, laid out as by `device_layout`. Their rank is at most
        `max_rank`.
        """
        pointers = torch.zeros(self._pointers.shape[:2], dtype=torch.int64)
        ranks = torch.zeros(self._ranks.shape[0], dtype=torch.int32)
        scales = torch.zeros(self._scales.shape[0], dtype=torch.float32)
        for module, pair in pairs.items():
            pointers[module, 0], pointers[module, 1] = pair.A.data_ptr(), pair.B.data_ptr()
            ranks[module], scales[module] = pair.A.shape[0], pair.scale
        self._ranks[:, slot] = ranks.to(self._device)
        self._pointers[:, :, slot] = pointers.to(self._device)
        self._scales[:, slot] = scales.to(self._device)
        self._held[slot] = pairs

    def clear(self, slot: int) -> None:
        self._ranks[:, slot] = 0
        self._held.pop(slot, None)

    def add(
        self, module: int, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, tiles: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y [..., out] += scale * B A x [..., in], by the `slots` [T] of the rows; -1 for none. `tiles`: see
        `tiles_of`, if there are any.
        """
        kernels, starts = (_BY_ROW, (slots,)) if tiles is None else (_BY_TILE, (tiles, slots))
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        rows, width = flat_x.shape
        outputs = flat_y.shape[1]
        pointers, ranks = self._pointers[module], self._ranks[module]
        narrow = torch.empty(rows, self._max_rank, dtype=torch.float32, device=x.device)
        programs = starts[0].shape[0]
        kernels.shrink[(programs, self._max_rank // _BLOCK_R)](
            flat_x,
            *starts,
            pointers,
            ranks,
            self._scales[module],
            narrow,
            flat_x.stride(0),
            narrow.stride(0),
            IN=width,
            BLOCK_R=_BLOCK_R,
            BLOCK_K=kernels.block_k,
            **kernels.sizes,
        )
        kernels.expand[(programs, -(-outputs // kernels.block_o))](
            flat_y,
            *starts,
            pointers,
            ranks,
            narrow,
            flat_y.stride(0),
            narrow.stride(0),
            pointers.shape[1],
            OUT=outputs,
            BLOCK_O=kernels.block_o,
            BLOCK_R=_BLOCK_R,
            **kernels.sizes,
        )
        return y


class RowAdapters(AdapterModules):
    """Adapters on modules that also compute row by row, while `AdapterContext.by_row` is set.

    Only linear layers do. `runs_by_row` says whether a slot changes nothing else.
    """

    def __init__(
        self,
        model: nn.Module,
        context: AdapterContext,
        *,
        adaptable: Mapping[str, TargetKind],
        num_slots: int,
        max_rank: int,
        **rest: Any,
    ) -> None:
        """`rest`: see `AdapterModules`."""
        super().__init__(model, context, adaptable=adaptable, **rest)
        linear = sorted(
            path
            for path, kind in adaptable.items()
            # The kernels read A and B in the dtype of x and y, which is not the model's everywhere in every model.
            if kind is TargetKind.LINEAR and model.get_submodule(path).weight.dtype == self._dtype
        )
        self._numbers = {path: number for number, path in enumerate(linear)}
        self._tables = SlotTables(len(linear), num_slots, max_rank, self._device)
        self._max_rank = max_rank
        self._others: set[int] = set()
        for path, number in self._numbers.items():
            self.wrap_linear(path).by_row = partial(self._tables.add, number)

    def prepare(self, weights: AdapterWeights) -> AdapterWeights:
        prepared = super().prepare(weights)
        return replace(prepared, pairs={path: device_layout(pair) for path, pair in prepared.pairs.items()})

    def install(self, slot: int, adapter: AdapterWeights) -> None:
        super().install(slot, adapter)
        pairs = {
            self._numbers[path]: pair
            for path, pair in adapter.pairs.items()
            if path in self._numbers and pair.A.shape[0] <= self._max_rank  # parts of a fused layer add up
        }
        self._tables.put(slot, pairs)
        if len(pairs) < len(adapter.pairs):
            self._others.add(slot)

    def remove(self, slot: int) -> None:
        self._tables.clear(slot)
        self._others.discard(slot)
        super().remove(slot)

    def runs_by_row(self, slot: int) -> bool:
        return slot not in self._others

    def withdraw(self) -> None:
        """Restore the model. It must hold no adapter."""
        for path in self._numbers:
            self._model.set_submodule(path, self.wrap_linear(path).base)


def check_products(dtype: torch.dtype, device: torch.device) -> None:
    """Raises what the kernels raise on this device, and `RuntimeError` when their results are wrong."""
    generator = torch.Generator().manual_seed(0)
    A, B, x = (torch.randn(size, generator=generator).to(device, dtype) for size in ((8, 80), (48, 8), (40, 80)))
    tables = SlotTables(1, 2, 8, device)
    tables.put(1, {0: device_layout(LoraPair(A, B, 0.5))})
    slots = torch.tensor([-1] + [1] * 39, dtype=torch.int32, device=device)
    tiles = torch.tensor([[1, TILE_ROWS], [1 + TILE_ROWS, 39 - TILE_ROWS]], dtype=torch.int32, device=device)
    expected = 0.5 * (x.float() @ A.float().T) @ B.float().T
    expected[0] = 0
    for stretches in (None, tiles):
        found = tables.add(0, torch.zeros(40, 48, dtype=dtype, device=device), x, slots, stretches).float()
        difference = float((found - expected).norm() / expected.norm())
        if not difference < 0.02:  # NaN is not
            raise RuntimeError(f"the products of adapters differ by {difference:.3g} (relative)")
