"""Adapters made to take an engine's time or memory: each is refused by name and soon, and other streams go on."""

import contextlib
import json
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from engines.interface.errors import AdapterRefused
from engines.interface.protocol import Adapter
from engines.lora.format.digest import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from engines.lora.format.targets import LoraTargets
from tests.support.engines.engine_harness import (
    DrivenEngine,
    clear_prompt,
    engine_config,
    prompt_of,
    reference_greedy,
    request,
)
from tests.support.files.lora_files import adapter_at, read, targets_of, write_adapter

MODULE = "model.layers.0.self_attn.q_proj"
Q = f"base_model.model.{MODULE}"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
PAIR = {A: torch.ones(4, 64), B: torch.ones(128, 4)}
MAX_CPU_S = 1.5  # the slowest takes a third of it


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def tensor_file(tensors: Mapping[str, object], data: bytes = b"") -> bytes:
    return file(json.dumps(tensors).encode(), data)


@dataclass(frozen=True)
class Hostile:
    """`error`: the exact message. `weights` None: those of a good adapter."""

    error: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    config: bytes | None = None
    weights: bytes | None = None

    def write(self, folder: Path) -> Adapter:
        write_adapter(folder, self.fields, PAIR)
        if self.config is not None:
            (folder / CONFIG_FILE).write_bytes(self.config)
        if self.weights is not None:
            (folder / WEIGHTS_FILE).write_bytes(self.weights)
        return adapter_at(folder)


W, C = f"{WEIGHTS_FILE}: ", f"{CONFIG_FILE}: "
MILLION = {f"m{i}.q": 4 for i in range(1_000_000)}
MILLION_BYTES = len(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": MILLION}))
NESTED = "(" * 20 + "a" + ")+" * 20
SLOW = r"((((\S{1,9}){1,9}){1,9}){1,9})\s"
CORPUS = {
    "dimensions that overflow before a zero": Hostile(
        f"{W}'{A}' has the shape [1099511627776, 1099511627776, 0], whose product is over 2^63.",
        weights=tensor_file({A: entry("F32", [1 << 40, 1 << 40, 0], 0, 0)}),
    ),
    "dimensions that overflow after a zero": Hostile(
        f"{W}'{A}' has the shape [0, 1099511627776, 1099511627776], whose product is over 2^63.",
        weights=tensor_file({A: entry("F32", [0, 1 << 40, 1 << 40], 0, 0)}),
    ),
    "a large dimension beside a zero": Hostile(
        f"{W}'{MODULE}' has the shapes [4, 0] and [1099511627776, 0], which are not matrices.",
        weights=tensor_file({A: entry("F32", [4, 0], 0, 0), B: entry("F32", [1 << 40, 0], 0, 0)}),
    ),
    "a shape beyond the file": Hostile(
        f"{W}'{A}' has 4 bytes, not the 4398046511104 of F32 [1099511627776].",
        weights=tensor_file({A: entry("F32", [1 << 40], 0, 4)}, b"\0" * 4),
    ),
    "a negative offset": Hostile(
        f"{W}'{A}' has the data_offsets [-4, 0].", weights=tensor_file({A: entry("F32", [1], -4, 0)})
    ),
    "offsets beyond 64 bits": Hostile(
        f"{W}'{A}' has the data_offsets [18446744073709551616, 18446744073709551616].",
        weights=tensor_file({A: entry("F32", [0], 1 << 64, 1 << 64)}),
    ),
    "a header without an end": Hostile(
        f"{W}its header must have at most 33554432 bytes, not 9223372036854775808.",
        weights=struct.pack("<Q", 1 << 63),
    ),
    "a hundred and fifty thousand tensors": Hostile(
        f"{W}it holds more than {targets_of('llama').max_tensors} tensors, all that the base model has room for.",
        weights=tensor_file({f"layers.{i}.mlp.up_proj.lora_A": entry("F32", [0], 0, 0) for i in range(150_000)}),
    ),
    "a name twice": Hostile(
        f"{W}its header has '{A}' twice.",
        weights=file(b"{%s,%s}" % ((json.dumps({A: entry("F32", [0], 0, 0)})[1:-1].encode(),) * 2)),
    ),
    "a deep header": Hostile(
        f"{W}its header is not JSON, or has an entry that is too long.",
        weights=file(b'{"__metadata__":' + b"[" * 1_000_000),
    ),
    "a deep configuration": Hostile(f"{C}it is not JSON.", config=b'{"r":' + b"[" * 1_000_000),
    "a number of a million digits": Hostile(f"{C}it is not JSON.", config=b'{"r":' + b"9" * 1_000_000 + b"}"),
    "integers": Hostile(
        f"{W}'{A}' has dtype I64; it must be one of F64, F32, F16, BF16.",
        weights=save({A: torch.ones(4, 64, dtype=torch.int64), B: PAIR[B]}),
    ),
    "complex numbers": Hostile(
        f"{W}'{A}' has dtype C64; it must be one of F64, F32, F16, BF16.",
        weights=save({A: torch.ones(4, 64, dtype=torch.complex64), B: PAIR[B]}),
    ),
    "NaN": Hostile(f"{W}'{B}' holds NaN or infinity.", weights=save({A: PAIR[A], B: PAIR[B] * float("nan")})),
    "no partner": Hostile(
        f"{W}'{MODULE}' has lora_A without the other matrix.", weights=save({A: PAIR[A]})
    ),
    "another script": Hostile(
        f"{W}'{Q}\u0456.lora_A.weight' is not a tensor of a LoRA adapter that can be applied here.",
        weights=save({f"{Q}\u0456.lora_A.weight": PAIR[A]}),
    ),
    "rank 0": Hostile(f"{C}r must be a positive integer, not 0.", {"r": 0}),
    "a rank like a size": Hostile(
        f"{W}'{MODULE}' has lora_A of shape [4, 64], the configuration says rank 999999999.",
        {"r": 999_999_999},
    ),
    "alpha 1e308": Hostile(f"{C}lora_alpha must be a number, not 1e+308.", {"lora_alpha": 1e308}),
    "a million keys": Hostile(
        f"{CONFIG_FILE} has {MILLION_BYTES} bytes; the limit is {MAX_CONFIG_BYTES}.", {"rank_pattern": MILLION}
    ),
    "no expression": Hostile(
        f"{C}the expression '(' of target_modules is not a regular expression: missing ), unterminated subpattern at "
        "position 0.",
        {"target_modules": "("},
    ),
    "an expression that doubles with each level": Hostile(
        f"{C}the expression '{NESTED}' of target_modules repeats so much that it is 20477 characters, more than 20000.",
        {"target_modules": NESTED},
    ),
    "an expression that is written out": Hostile(
        f"{C}the expression 'a{{4294967294}}' of exclude_modules uses '{{' at position 1, which is not supported "
        "there.",
        {"exclude_modules": "a{4294967294}"},
    ),
    "an expression that backtracks": Hostile(
        f"{C}the expression of target_modules takes too long to match '{MODULE}'.",
        {"target_modules": SLOW},
    ),
    "a thousand expressions": Hostile(
        f"{C}a key of rank_pattern takes too long to match '{MODULE}'.",
        {"rank_pattern": {f"{SLOW}{i}": 4 for i in range(1000)}},
    ),
    "more expressions than a configuration has room for": Hostile(
        f"{C}alpha_pattern has more than 1000 keys that are expressions.",
        {"alpha_pattern": {f"{i}.*": 4 for i in range(20_000)}},
    ),
    "values of 1e30": Hostile(
        "With this adapter the model computes NaN or infinity: its values are too large.",
        weights=save({name: tensor * 1e30 for name, tensor in PAIR.items()}),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> LoraTargets:
    return targets_of("llama")


@pytest.mark.parametrize("case", [case for case in CORPUS if case != "values of 1e30"])
def test_a_hostile_adapter_is_refused_by_name_and_soon(case: str, llama: LoraTargets, tmp_path: Path) -> None:
    hostile = CORPUS[case]
    hostile.write(tmp_path)
    started = time.thread_time()
    with pytest.raises(AdapterRefused) as refusal:
        read(tmp_path, llama)
    assert time.thread_time() - started < MAX_CPU_S
    assert str(refusal.value) == hostile.error


def test_as_many_keys_as_a_configuration_has_room_for_are_looked_up_soon(llama: LoraTargets, tmp_path: Path) -> None:
    """Names of one length, so that each may be any of them."""
    keys = {f"layers.{i:05d}.mlp.q_proj": 4 for i in range(30_000)}
    write_adapter(tmp_path, {"rank_pattern": keys, "alpha_pattern": {"self_attn.q.proj": 2}}, PAIR)
    started = time.thread_time()
    assert read(tmp_path, llama).pairs["model.layers.0.self_attn.q_proj"].scale == 0.5
    assert time.thread_time() - started < MAX_CPU_S


def test_an_engine_with_hostile_adapters_goes_on_with_its_streams(tmp_path: Path) -> None:
    prompt = clear_prompt("llama", 20, 24)
    cases = list(CORPUS)
    bad = [request(prompt_of(5), adapter=CORPUS[case].write(tmp_path / str(i))) for i, case in enumerate(cases)]
    streams = [request(prompt, max_tokens=24) for _ in bad]
    mixed = [made for pair in zip(streams, bad, strict=True) for made in pair]
    with DrivenEngine(engine_config("llama", max_waiting=len(mixed))) as engine:
        results = engine.generate(*mixed, arrivals=[2 * i for i in range(len(mixed))])
        assert [str(result.error) for result in results[1::2]] == [CORPUS[case].error for case in cases]
        assert all(isinstance(result.error, AdapterRefused) for result in results[1::2])
        for result in results[::2]:
            assert tuple(result.token_ids) == reference_greedy("llama", None, prompt, 24)[0]
        assert engine.stats().adapter_slots_pinned == 0


_shape = st.lists(st.sampled_from([0, 1, 2, 4, 16, 48, 64, 96]), max_size=3)
_module = st.sampled_from(
    ["mlp.experts", "mlp.experts.base_layer", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.experts.w1",
     "mlp.experts.0.up_proj", "mlp.gate", "self_attn.q_proj", "self_attn.qkv_proj"]
)  # fmt: skip


@given(
    modules=st.dictionaries(_module, st.tuples(_shape, _shape), min_size=1, max_size=3),
    parameters=st.sampled_from([{}, {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shapes_give_an_adapter_or_a_refusal(
    moe: LoraTargets,
    tmp_path: Path,
    modules: dict[str, tuple[list[int], list[int]]],
    parameters: dict[str, object],
    dtype: torch.dtype,
) -> None:
    tensors = {
        f"base_model.model.model.layers.0.{module}.lora_{half}.weight": torch.ones(shape, dtype=dtype)
        for module, shapes in modules.items()
        for half, shape in zip("AB", shapes, strict=True)
    }
    write_adapter(tmp_path, parameters, tensors)
    with contextlib.suppress(AdapterRefused):
        read(tmp_path, moe)


@pytest.fixture(scope="module")
def moe() -> LoraTargets:
    return targets_of("qwen3-moe")
