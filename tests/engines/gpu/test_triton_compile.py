"""The Triton kernels as compilers for real GPUs see them, without such a GPU."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.support.readme_blocks import ROOT

pytestmark = pytest.mark.slow

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}  # that a program may have, by compute capability


@cache
def compiled_for(capability: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "support" / "engines" / "triton_compile.py"), str(capability)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_and_fit_the_device(capability: int) -> None:
    kernels = compiled_for(capability)
    assert {kernel["kernel"] for kernel in kernels} == {
        "attend_kernel",
        "merge_kernel",
        "shrink_kernel",
        "expand_kernel",
        "shrink_tiles_kernel",
        "expand_tiles_kernel",
    }
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["spilled_bytes"] <= 64, kernel  # a few bytes outside of the loop cost nothing


def test_what_makes_up_the_traffic_is_loaded_16_bytes_at_a_time() -> None:
    """K and V, A and B. Metadata is not: lengths, tables, pointers are numbers of 4 and 8 bytes."""
    for kernel in compiled_for(90):
        if kernel["dtype"] == "torch.bfloat16" and kernel["kernel"] != "merge_kernel":
            loads = kernel["loads"]
            assert any("v4" in name or "cp.async.cg" in name for name in loads), kernel
            # One is y, of which an adapter's program has one number a thread.
            assert sum(count for name, count in loads.items() if name.endswith(".b16")) <= 1, kernel
