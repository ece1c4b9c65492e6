"""Adapters for the C kernels. The loader's thread repacks them; a slot is then a table of pointers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engines.interface.errors import AdapterRefused
from engines.lora.apply import AdapterModules
from engines.lora.format.pairs import LoraPair
from engines.lora.format.weights import AdapterWeights
from engines.native.decoder import NativeDecoder, PackedPair
from engines.native.structure import MODULES

MAX_RANK = 512
"""Of one pair, as in `src/lora.h`."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """`nbytes` in memory. `rest`: what the kernels do not compute (an embedding); torch modules apply it."""

    nbytes: int
    packed: tuple[PackedPair, ...]
    rest: AdapterWeights


class NativeAdapters:
    """Implements `lora.cache.SlotModules` over a `NativeDecoder`. `layers`, `head`: paths in the model."""

    def __init__(self, decoder: NativeDecoder, others: AdapterModules, *, layers: str, head: str) -> None:
        self._decoder = decoder
        self._others = others
        self._layers = layers + "."
        self._head = head
        self._held: dict[int, PackedAdapter] = {}

    def prepare(self, weights: AdapterWeights) -> PackedAdapter:
        """Repack for the kernels. Safe on any thread. Raises `AdapterRefused` as `AdapterModules` does."""
        packed = []
        rest: dict[str, LoraPair] = {}
        for path, pair in weights.pairs.items():
            place = self._place(path)
            if place is None:
                rest[path] = pair
            else:
                packed.append(_pack(*place, pair.cast(path, self._decoder.dtype, _CPU)))
        others = self._others.prepare(AdapterWeights(weights.digest, weights.rank, _nbytes(rest), rest))
        nbytes = others.nbytes + sum(pair.a.nbytes + pair.b.nbytes for pair in packed)
        return PackedAdapter(nbytes, tuple(packed), others)

    def install(self, slot: int, adapter: PackedAdapter) -> None:
        self._held[slot] = adapter  # the kernels only keep pointers
        for pair in adapter.packed:
            self._decoder.set_pair(slot, pair)
        self._others.install(slot, adapter.rest)

    def remove(self, slot: int) -> None:
        self._decoder.clear_slot(slot)
        self._others.remove(slot)
        self._held.pop(slot, None)

    def _place(self, path: str) -> tuple[int, int] | None:
        """(layer, module) in the kernels' numbering, (-1, 0) for the head, None for what torch computes."""
        if path == self._head:
            return -1, 0
        if not path.startswith(self._layers):
            return None
        number, *_, name = path.removeprefix(self._layers).split(".")
        if name not in MODULES:
            raise AdapterRefused(f"The adapter changes {path!r}, which this engine does not adapt on this model.")
        return int(number), MODULES.index(name)


def _nbytes(pairs: Mapping[str, LoraPair]) -> int:
    return sum(pair.A.nbytes + pair.B.nbytes for pair in pairs.values())


def _pack(layer: int, module: int, pair: LoraPair) -> PackedPair:
    a, b = pair.A, pair.B
    rank = a.shape[0]
    if rank > MAX_RANK:
        raise AdapterRefused(f"The adapter has rank {rank}, which is over this engine's limit of {MAX_RANK}.")
    if a.dtype != torch.bfloat16:
        return PackedPair(layer, module, a.contiguous(), b.t().contiguous(), rank, pair.scale)
    if rank % 2:
        a = torch.cat([a, a.new_zeros(1, a.shape[1])])
        b = torch.cat([b, b.new_zeros(b.shape[0], 1)], dim=1)
        rank += 1
    b = b.reshape(b.shape[0], rank // 2, 2).transpose(0, 1)
    return PackedPair(layer, module, a.contiguous(), b.contiguous(), rank, pair.scale)
