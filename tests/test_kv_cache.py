"""How large the KV cache is made."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import ModelRefused
from engines.kv_cache import KVCache, LayerShape, blocks_for, free_memory

SHAPES = {0: LayerShape(2, 8, 8, torch.float32), 1: LayerShape(4, 12, 4, torch.bfloat16)}
BLOCK_BYTES = 16 * (2 * 16 * 4 + 4 * 16 * 2)


def blocks(budget_bytes: int, *, context_length: int = 100, max_running: int = 3) -> int:
    return blocks_for(SHAPES, 16, budget_bytes=budget_bytes, context_length=context_length, max_running=max_running)


def test_the_cache_takes_the_bytes_that_its_shapes_say() -> None:
    cache = KVCache(SHAPES, 5, 16, torch.device("cpu"))
    assert sum(values.nbytes for layer in SHAPES for values in (cache.k[layer], cache.v[layer])) == 5 * BLOCK_BYTES


@given(st.integers(0, 100 * BLOCK_BYTES), st.integers(1, 300), st.integers(1, 5))
def test_the_budget_is_used_up_to_what_all_sequences_can_need_and_never_exceeded(
    budget: int, context_length: int, max_running: int
) -> None:
    per_sequence = -(-context_length // 16)
    if budget < (1 + per_sequence) * BLOCK_BYTES:
        with pytest.raises(ModelRefused, match=f"give at least {(1 + per_sequence) * BLOCK_BYTES} bytes"):
            blocks(budget, context_length=context_length, max_running=max_running)
        return
    count = blocks(budget, context_length=context_length, max_running=max_running)
    assert count * BLOCK_BYTES <= budget
    assert count == min(budget // BLOCK_BYTES, 1 + per_sequence * max_running)


def test_free_memory_is_some_of_the_machines() -> None:
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < free_memory(torch.device("cpu")) <= total
