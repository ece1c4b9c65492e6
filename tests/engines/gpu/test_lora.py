"""Adapters row by row, on the device: the products are those of each row's own adapter."""

from collections.abc import Iterator

import pytest
import torch

from engines.gpu.lora import SlotTables, device_layout, tiles_of
from engines.lora.format.pairs import LoraPair
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence
from tests.support.engines.engine_harness import DEVICE, request

SLOTS, MODULES, MAX_RANK = 4, 2, 48
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def pair(rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> LoraPair:
    A, B = torch.randn(rank, inputs), torch.randn(outputs, rank)
    return device_layout(LoraPair(A.to(DEVICE, dtype), B.to(DEVICE, dtype), scale=0.3 * rank))


def on_device(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def chunk(slot: int, length: int) -> Chunk:
    sequence = TokenSequence.of(request([0] * length), NO_SINK)
    sequence.slot = slot
    return Chunk(sequence, 0, length)


def expected(y: torch.Tensor, x: torch.Tensor, by_row: list[LoraPair | None]) -> torch.Tensor:
    out = y.double()
    for row, one in enumerate(by_row):
        if one is not None:
            out[row] += one.scale * (one.B.double() @ (one.A.double() @ x[row].double()))
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (300, 130), (5, 3)])
def test_each_row_gets_its_own_adapter_at_its_own_rank(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    tables = SlotTables(MODULES, SLOTS, MAX_RANK, DEVICE)
    pairs = [pair(rank, inputs, outputs, dtype) for rank in (1, 16, 17, 48)]
    for slot, one in enumerate(pairs):
        tables.put(slot, {1: one} if slot != 2 else {0: one})  # slot 2 does not change module 1
    by_slot = {-1: None, 0: pairs[0], 1: pairs[1], 2: None, 3: pairs[3]}
    slots = [3, -1, 0, 1, 2, 3, 1]
    x = torch.randn(len(slots), inputs).to(DEVICE, dtype)
    y = torch.randn(len(slots), outputs).to(DEVICE, dtype)
    want = expected(y, x, [by_slot[slot] for slot in slots])
    found = tables.add(1, y[None].clone(), x[None], on_device(slots))[0]
    error = (found.double() - want).norm() / want.norm()
    assert float(error) < TOLERANCE[dtype]
    assert torch.equal(found[1], y[1])
    assert torch.equal(found[4], y[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (300, 130), (5, 3)])
def test_each_stretch_gets_its_own_adapter_at_its_own_rank(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    tables = SlotTables(1, SLOTS, MAX_RANK, DEVICE)
    pairs = [pair(rank, inputs, outputs, dtype) for rank in (1, 17, 48)]
    for slot, one in enumerate(pairs):
        tables.put(slot, {0: one})
    chunks = [chunk(slot, length) for slot, length in ((2, 1), (-1, 40), (0, 33), (3, 5), (1, 64), (1, 2))]
    slots = [one.sequence.slot for one in chunks for _ in range(one.length)]
    x = torch.randn(len(slots), inputs).to(DEVICE, dtype)
    y = torch.randn(len(slots), outputs).to(DEVICE, dtype)
    want = expected(y, x, [pairs[slot] if 0 <= slot < 3 else None for slot in slots])  # slot 3 is empty
    found = tables.add(0, y.clone(), x, on_device(slots), tiles_of(chunks, DEVICE))
    assert float((found.double() - want).norm() / want.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)
    untouched = torch.tensor([slot in (-1, 3) for slot in slots])
    assert torch.equal(found[untouched], y[untouched])


def test_a_cleared_slot_adds_nothing_and_a_new_adapter_takes_its_place() -> None:
    tables = SlotTables(1, SLOTS, MAX_RANK, DEVICE)
    slots = on_device([2])
    x, y = torch.randn(1, 8, device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    old, new = pair(4, 8, 8, torch.float32), pair(2, 8, 8, torch.float32)
    tables.put(2, {0: old})
    assert tables.add(0, y.clone(), x, slots).any()
    tables.clear(2)
    assert not tables.add(0, y.clone(), x, slots).any()
    tables.put(2, {0: new})
    torch.testing.assert_close(tables.add(0, y.clone(), x, slots).double(), expected(y, x, [new]))
    tables.put(2, {})
    assert not tables.add(0, y.clone(), x, slots).any()


def test_pairs_are_laid_out_for_loads_of_16_bytes_whatever_they_were_cut_from() -> None:
    whole = torch.randn(9, 33)
    for A in (whole[:4, :32], whole.flatten()[1:129].view(4, 32), whole[:4].contiguous()[:, :32]):
        for B in (whole[:5, :4], whole.flatten()[3:23].view(5, 4), whole.T[:5, :4]):
            found = device_layout(LoraPair(A, B, 0.5))
            assert torch.equal(found.A, A)
            assert torch.equal(found.B, B)
            assert found.A.is_contiguous()
            assert found.B.mT.is_contiguous()
            assert found.A.data_ptr() % 16 == found.B.data_ptr() % 16 == 0
