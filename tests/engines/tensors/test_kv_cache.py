"""How large the KV cache is made."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.interface.errors import ModelRefused
from engines.tensors.kv_cache import KVCache, LayerShape, blocks_for, free_memory

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
        with pytest.raises(ModelRefused, match=f"Give at least {(1 + per_sequence) * BLOCK_BYTES} bytes"):
            blocks(budget, context_length=context_length, max_running=max_running)
        return
    count = blocks(budget, context_length=context_length, max_running=max_running)
    assert count * BLOCK_BYTES <= budget
    assert count == min(budget // BLOCK_BYTES, 1 + per_sequence * max_running)


def test_free_memory_is_some_of_the_machines() -> None:
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < free_memory(torch.device("cpu")) <= total


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n"}, 500 * 1024),
        (
            {
                "proc/meminfo": "MemAvailable: 500 kB\n",
                "sys/fs/cgroup/memory.max": "300000\n",
                "sys/fs/cgroup/memory.current": "250000\n",
                "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 100000\nactive_file 7\n",
            },
            150_000,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 500 kB\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            0,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 500 kB\n",
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "250000\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 100000\n",
            },
            500 * 1024,
        ),
    ],
)
def test_free_memory_is_what_the_machine_and_the_control_group_leave(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert free_memory(torch.device("cpu"), tmp_path) == expected
