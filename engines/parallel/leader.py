"""The leader's runner and adapter modules: whatever they do, all processes do."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engines.compute.runner import ModelRunner
from engines.interface.errors import EngineError
from engines.interface.protocol import HostTensor
from engines.lora.apply import AdapterModules
from engines.lora.format.weights import AdapterWeights
from engines.parallel.group import TensorGroup
from engines.parallel.messages import CheckHealth, ChunkMessage, Encode, Forward, Install, Remove
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch

_HOST = torch.device("cpu")


class LeadingRunner:
    """Implements `loop.Runner`. A forward that raises ends the engine. The other processes may be in the middle of it,
    and would add the next forward's numbers to its sums.
    """

    repeatable = False

    def __init__(self, runner: ModelRunner, group: TensorGroup, block_size: int) -> None:
        self._runner = runner
        self._group = group
        self._block_size = block_size
        if runner.model.vision is not None:
            runner.model.vision.announce = self._announce

    def forward(self, chunks: Sequence[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        try:
            batch = self._runner.lay_out(chunks)
            images = batch.images.to(_HOST) if batch.images else None
            self._group.tell(Forward(tuple(ChunkMessage.of(chunk, self._block_size) for chunk in chunks), images))
            return batch, self._runner.run(batch)
        except BaseException:
            self._group.lost = True
            raise

    def _announce(self, token_ids: list[int], tensors: Mapping[str, HostTensor]) -> None:
        self._group.tell(Encode(tuple(token_ids), tensors))

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> None:
        """Always None: the other processes do not know what this one has drawn."""

    def check_health(self) -> None:
        if self._group.lost:
            raise EngineError("The processes of the model are out of step, or one has ended.")
        self._group.tell(CheckHealth())
        self._runner.check_health()


@dataclass(frozen=True, slots=True, eq=False)
class LedAdapter:
    """This process' part of an adapter, and the whole adapter for the other processes."""

    own: AdapterWeights
    whole: bytes

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + len(self.whole)


class LeadingModules:
    """Implements `lora.cache.SlotModules`."""

    def __init__(self, modules: AdapterModules, group: TensorGroup) -> None:
        self._modules = modules
        self._group = group

    def prepare(self, weights: AdapterWeights) -> LedAdapter:
        """Safe on any thread. Raises `AdapterRefused` as `AdapterModules` does."""
        return LedAdapter(self._modules.prepare(weights), pickle.dumps(weights))

    def install(self, slot: int, adapter: LedAdapter) -> None:
        self._modules.install(slot, adapter.own)
        self._group.tell(Install(slot, adapter.whole))

    def remove(self, slot: int) -> None:
        self._modules.remove(slot)
        self._group.tell(Remove(slot))
