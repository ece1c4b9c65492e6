"""Files that are not what they seem: changed, missing, malformed, endless."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from engines.interface.errors import AdapterChanged, AdapterError, AdapterRefused, AdapterUnavailable
from engines.interface.protocol import Adapter
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from engines.lora.format.targets import LoraTargets
from engines.lora.format.tensor_file import MAX_HEADER_BYTES, TensorFileError, parse_header
from engines.lora.format.weights import read_adapter
from tests.support.files.lora_files import adapter_at, read, targets_of, write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
LIMITS = {"max_rank": 64, "max_bytes": 1 << 20}


@pytest.fixture(scope="module")
def llama() -> LoraTargets:
    return targets_of("llama")


def _q() -> dict[str, torch.Tensor]:
    return {A: torch.ones(4, 64), B: torch.ones(128, 4)}


def test_other_content_than_the_digest_s_is_a_change_and_not_looked_at(llama: LoraTargets, tmp_path: Path) -> None:
    adapter = adapter_at(write_adapter(tmp_path, {}, _q()))
    (tmp_path / CONFIG_FILE).write_text("not JSON")
    with pytest.raises(AdapterChanged):
        read_adapter(adapter, llama, **LIMITS)


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_that_went_away_is_a_change(missing: str, llama: LoraTargets, tmp_path: Path) -> None:
    adapter = adapter_at(write_adapter(tmp_path, {}, _q()))
    (tmp_path / missing).unlink()
    with pytest.raises(AdapterChanged):
        read_adapter(adapter, llama, **LIMITS)


def test_a_pickle_is_never_read(llama: LoraTargets, tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, _q())
    (tmp_path / WEIGHTS_FILE).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterRefused, match=r"adapter_model\.bin is a pickle and is never read"):
        read_adapter(Adapter("0" * 64, str(tmp_path)), llama, **LIMITS)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_fifo_or_a_directory_in_a_file_s_place_is_refused_at_once(
    name: str, llama: LoraTargets, tmp_path: Path
) -> None:
    write_adapter(tmp_path, {}, _q())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(AdapterRefused, match=f"{name} is not a regular file"):
        read_adapter(Adapter("0" * 64, str(tmp_path)), llama, **LIMITS)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(AdapterRefused, match=f"{name} is not a regular file"):
        read_adapter(Adapter("0" * 64, str(tmp_path)), llama, **LIMITS)


def test_a_loop_of_links_is_unavailable(llama: LoraTargets, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).symlink_to(CONFIG_FILE)
    with pytest.raises(AdapterUnavailable, match=f"{CONFIG_FILE} cannot be opened"):
        read_adapter(Adapter("0" * 64, str(tmp_path)), llama, **LIMITS)


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(start: int, end: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


HEADERS: dict[str, tuple[bytes, str]] = {
    "short": (b"\0" * 7, "ends in the header: 7 bytes"),
    "cut": (_file({})[:-1], "ends in the header: 9 bytes of 10"),
    "huge": (struct.pack("<Q", 1 << 63), f"at most {MAX_HEADER_BYTES} bytes"),
    "not JSON": (_file(b"{]"), "not JSON"),
    "not UTF-8": (_file(b'{"\xff": 1}'), "not JSON"),
    "too deep": (_file(b'{"__metadata__": ' + b"[" * 200_000), "not JSON"),
    "a list": (_file([]), "not a JSON object"),
    "no object": (_file(b"   "), "not a JSON object"),
    "no colon": (_file(b'{"a" 1}'), "':' is missing"),
    "no comma": (_file(b'{"a": 1 "b": 2}'), "not a dtype"),
    "a comma too many": (_file(b'{"__metadata__": {},}'), "not JSON"),
    "no end": (_file(b'{"__metadata__": {}'), "',' is missing"),
    "more": (_file(b"{}{}"), "something follows its end"),
    "a number for a name": (_file(b"{1: 2}"), "not JSON"),
    "a name twice": (
        _file(b'{"__metadata__": {}, "a": %s, "a": %s}' % ((json.dumps(_entry(0, 1)).encode(),) * 2)),
        "twice",
    ),
    "a long entry": (_file({"a": _entry(0, 0, "U8", [0] * 5000)}), "an entry that is too long"),
    "a gap": (_file({"a": _entry(0, 1), "b": _entry(2, 3)}), "overlap or leave a gap at byte .* before 'b'"),
    "an overlap": (_file({"a": _entry(0, 2), "b": _entry(1, 3)}), "overlap or leave a gap"),
    "twice the same bytes": (_file({"a": _entry(0, 2), "b": _entry(0, 2)}), "overlap or leave a gap"),
    "a late start": (_file({"a": _entry(1, 3)}), "overlap or leave a gap"),
    "a negative offset": (_file({"a": _entry(-1, 1)}), r"'a' has the data_offsets \[-1, 1\]"),
    "reversed": (_file({"a": _entry(2, 1, shape=[1])}), r"'a' has the data_offsets \[2, 1\]"),
    "an enormous offset": (_file({"a": _entry(0, 1 << 63)}), r"'a' has the data_offsets \[0, 9223372036854775808\]"),
    "boolean offsets": (
        _file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}),
        r"'a' has the data_offsets \[False, True\]",
    ),
    "dimensions that overflow": (
        _file({"a": _entry(0, 0, "F32", [1 << 40, 1 << 40, 0])}),
        r"'a' has the shape \[1099511627776, 1099511627776, 0\], whose product is over 2\^63",
    ),
    "more tensors than the model has modules for": (
        _file({f"t{i}": _entry(0, 0) for i in range(100_000)}),
        r"it holds more than \d\d tensors, all that the base model has room for\.",
    ),
    "the wrong size": (_file({"a": _entry(0, 4, "F32", [2])}), "'a' has 4 bytes, not the 8 of F32"),
    "an enormous size": (_file({"a": _entry(0, 4, "F32", [10**300, 10**300])}), "'a' has the shape"),
    "a negative dimension": (_file({"a": _entry(0, 4, "F32", [-1, -1])}), r"'a' has the shape \[-1, -1\]"),
    "a boolean dimension": (_file({"a": _entry(0, 4, "F32", [True])}), "'a' has the shape"),
    "a dimension of another type": (_file({"a": _entry(0, 4, "F32", ["1"])}), "'a' has the shape"),
    "many dimensions": (_file({"a": _entry(0, 1, "U8", [1] * 9)}), "'a' has the shape"),
    "an unknown dtype": (_file({"a": _entry(0, 1, "X1")}), "unknown dtype 'X1'"),
    "no offsets": (_file({"a": {"dtype": "U8", "shape": [1]}}), "entry of 'a' is not a dtype"),
    "offsets of another type": (
        _file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}),
        r"'a' has the data_offsets \[0, 1.0\]",
    ),
    "an entry of another type": (_file({"a": 1}), "entry of 'a'"),
    "a long name": (_file({"a" * 600: _entry(0, 1)}), "more than 512 characters"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_is_refused(case: str, llama: LoraTargets, tmp_path: Path) -> None:
    content, message = HEADERS[case]
    write_adapter(tmp_path, {}, _q())
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(AdapterRefused, match=rf"^adapter_model\.safetensors: .*{message}"):
        read(tmp_path, llama)


@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_a_file_of_another_size_than_its_header_says_is_refused(
    change: int, llama: LoraTargets, tmp_path: Path
) -> None:
    write_adapter(tmp_path, {}, _q())
    size = (tmp_path / WEIGHTS_FILE).stat().st_size
    os.truncate(tmp_path / WEIGHTS_FILE, size + change)
    with pytest.raises(AdapterRefused, match=f"it has {size + change} bytes, and its header describes {size}"):
        read(tmp_path, llama)


def test_a_header_that_is_not_padded_is_read(llama: LoraTargets, tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, {})
    tensors = {name: torch.randn_like(tensor) for name, tensor in _q().items()}
    a, b = (tensors[name].numpy().tobytes() for name in (A, B))
    header = json.dumps({A: _entry(0, len(a), "F32", [4, 64]), B: _entry(len(a), len(a) + len(b), "F32", [128, 4])})
    content = _file(header.encode().ljust(len(header) // 8 * 8 + 11), a + b)
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    pair = read(tmp_path, llama).pairs["model.layers.0.self_attn.q_proj"]
    assert torch.equal(pair.A, tensors[A])
    assert torch.equal(pair.B, tensors[B])


_shapes = st.lists(st.integers(0, 3), max_size=3)
_types = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool])


@given(
    tensors=st.dictionaries(st.text(max_size=8), st.tuples(_shapes, _types), max_size=5),
    position=st.integers(0, 400),
    replacement=st.binary(max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_what_is_read_is_what_the_safetensors_package_reads(
    tensors: dict[str, tuple[list[int], torch.dtype]], position: int, replacement: bytes
) -> None:
    content = save({name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()})
    content = content[:position] + replacement + content[position + len(replacement) :]
    try:
        expected = {name: tuple(tensor.shape) for name, tensor in load(content).items()}
    except (SafetensorError, KeyError, ValueError, RuntimeError):
        return
    found = parse_header(content, 5)
    assert found.extent == len(content)
    assert {name: entry.shape for name, entry in found.tensors.items()} == expected


@given(position=st.integers(0, 10_000), replacement=st.binary(min_size=1, max_size=8), which=st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_give_an_adapter_or_a_refusal(
    llama: LoraTargets, tmp_path: Path, position: int, replacement: bytes, which: bool
) -> None:
    write_adapter(tmp_path, {"target_modules": ["q_proj"], "rank_pattern": {"a.*b": 3}}, _q())
    file = tmp_path / (CONFIG_FILE if which else WEIGHTS_FILE)
    content = bytearray(file.read_bytes())
    position %= len(content)
    content[position : position + len(replacement)] = replacement
    file.write_bytes(content)
    try:
        pair = read(tmp_path, llama).pairs["model.layers.0.self_attn.q_proj"]
    except AdapterError:
        return
    assert pair.A.shape == (4, 64)
    assert pair.A.isfinite().all()


@given(content=st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_noise_is_no_tensor_file(content: bytes) -> None:
    with pytest.raises(TensorFileError):
        parse_header(content, 5)


def test_the_digest_tells_the_two_files_apart() -> None:
    assert adapter_digest(b"ab", b"c") != adapter_digest(b"a", b"bc")
    assert adapter_digest(b"ab", b"c") == adapter_digest(bytearray(b"ab"), memoryview(b"c"))
    assert len(adapter_digest(b"", b"")) == 64
