"""Compile the kernels for GPUs that are not here, as they would be launched for models of real sizes.

    python tests/support/engines/triton_compile.py 80 90

prints a line of JSON for each kernel: what the assembler says of its registers and its memory. The launches are those
of the product; only Triton's driver is replaced, by one that knows what it would compile for and launches nothing.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # it is read when the kernels are defined

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from engines.attention.interface import Attention
from engines.gpu.attention import PagedLayout, attend
from engines.gpu.lora import SlotTables

CPU = torch.device("cpu")
HEADS = {  # query heads, heads of K and V, their dimensions
    "SmolLM2-135M": (9, 3, 64, 64),
    "gpt-oss": (64, 8, 64, 64),
    "Qwen3-4B": (32, 8, 128, 128),
    "DeepSeek-V3": (128, 128, 192, 128),
    "Gemma-3-1B": (4, 1, 256, 256),
    "Gemma-3-4B": (8, 4, 256, 256),
}
LOADS = {"one": ([1], [3000]), "many": ([1] * 64, [500] * 64), "prefill": ([512], [1024])}  # new tokens, all tokens


@dataclass(frozen=True)
class Compiled:
    capability: int
    kernel: str
    case: str
    dtype: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    loads: dict[str, int]  # from global memory, by instruction


class Elsewhere:
    """Triton's driver of a device that is not here."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Callable[[], object]) -> list[tuple[str, Any]]:
    """The kernels that a launch needs."""
    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return found


def describe(capability: int, case: str, dtype: torch.dtype, name: str, kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(value) for value in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    loads = Counter(re.findall(r"\b(ld\.global[\w.]*|cp\.async\.c[ag]\.shared\.global)", kernel.asm["ptx"]))
    return Compiled(capability, name, case, str(dtype), registers, stack, kernel.metadata.shared, dict(loads))


def attention(
    heads: tuple[int, int, int, int], load: tuple[list[int], list[int]], asked: Attention, dtype: torch.dtype
) -> None:
    num_heads, kv_heads, k_dim, v_dim = heads
    new, lengths = load
    ends = torch.tensor([0, *new]).cumsum(0).int()
    tables = torch.zeros(len(new), -(-max(lengths) // 16), dtype=torch.int32)
    layout = PagedLayout(ends, torch.tensor(lengths, dtype=torch.int32), tables, tuple(new))
    q, k, v = (
        torch.empty(size, dtype=dtype)
        for size in ((sum(new), num_heads, k_dim), (64, 16, kv_heads, k_dim), (64, 16, kv_heads, v_dim))
    )
    attend(q, k, v, asked, layout, num_programs=264)


def everything(dtype: torch.dtype) -> None:
    """Gemma 2's window and soft cap, gpt-oss' sinks, and splits that are merged."""
    attention((8, 4, 256, 256), ([1, 1], [3000, 9]), Attention(0, 0.1, 4096, 50.0, torch.empty(8, dtype=dtype)), dtype)


def adapters(rows: int, dtype: torch.dtype, *, by_tiles: bool) -> None:
    tables = SlotTables(4, 8, 64, CPU)
    x, y = torch.empty(rows, 1024, dtype=dtype), torch.empty(rows, 3072, dtype=dtype)
    tiles = torch.zeros(3, 2, dtype=torch.int32) if by_tiles else None
    tables.add(0, y, x, torch.zeros(rows, dtype=torch.int32), tiles)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    for model, heads in HEADS.items():
        for load, tokens in LOADS.items():
            yield f"{model}, {load}", partial(attention, heads, tokens, Attention(0, 0.1), dtype)
    yield "everything", partial(everything, dtype)
    yield "adapters by row", partial(adapters, 8, dtype, by_tiles=False)
    yield "adapters by tiles", partial(adapters, 64, dtype, by_tiles=True)


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        driver.set_active(Elsewhere(capability))
        for dtype in (torch.bfloat16, torch.float32):
            for case, launch in cases(dtype):
                for name, kernel in compiled(launch):
                    print(json.dumps(asdict(describe(capability, case, dtype, name, kernel))), flush=True)


if __name__ == "__main__":
    main()
