"""The header of a safetensors file: which tensor lies where. Imports no torch.

    8 bytes: length of the header, little endian | header: JSON | the tensors' bytes, without gaps

This is a parser of our own because the bytes are read once, then hashed and parsed from the same memory. The
safetensors package parses a path, whose content may have changed by then, or copies every tensor. This parser accepts
what that package accepts, except shapes that torch has no strides for.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from engines.lora.format.digest import Buffer

MAX_HEADER_BYTES: Final = 32 << 20  # about 180,000 tensors: every expert of every layer
MAX_NAME_CHARACTERS: Final = 512
# Entries are parsed one by one: one call for the whole header would hold the interpreter for a second, and with it
# every request that is being decoded in the process.
_MAX_ENTRY_CHARACTERS: Final = 4096
_MAX_METADATA_CHARACTERS: Final = 1 << 20
_MAX_BYTES: Final = 1 << 63

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip


class TensorFileError(ValueError):
    """The header cannot be right, whatever follows; the message says what is wrong."""


class TensorFileTruncated(TensorFileError):
    """The bytes end before the header does. `needed`: how many bytes from the start of the file are enough."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message, needed)
        self.needed = needed

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`start` and `end` are bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A checked header. `extent`: how many bytes the whole file must have."""

    tensors: Mapping[str, TensorEntry]
    extent: int


def parse_header(head: Buffer, max_tensors: int) -> TensorFile:
    """`head`: the file from its start, at least to the end of the header. `max_tensors`: parsing stops at the first
    tensor beyond this number.

    Every tensor's extent fits its shape and dtype, and together they cover the data without gap or overlap. Raises
    `TensorFileTruncated` when `head` is too short, `TensorFileError` for everything else.
    """
    length = _header_length(head)
    tensors = dict[str, TensorEntry]()
    for name, entry in _entries(head, length):
        tensors[name] = entry
        if len(tensors) > max_tensors:
            raise TensorFileError(f"it holds more than {max_tensors} tensors, all that the base model has room for.")
    return TensorFile(tensors, _extent(8 + length, {name: (entry.start, entry.end) for name, entry in tensors.items()}))


def header_extent(head: Buffer) -> int:
    """How many bytes the whole file must have. Checks and raises as `parse_header`, but keeps only two numbers a
    tensor. A hundred thousand objects would make Python's garbage collector scan all objects of the process repeatedly.
    """
    length = _header_length(head)
    return _extent(8 + length, {name: (entry.start, entry.end) for name, entry in _entries(head, length)})


def _header_length(head: Buffer) -> int:
    if len(head) < 8:
        raise TensorFileTruncated(f"it ends in the header: {len(head)} bytes.", 8)
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise TensorFileError(f"its header must have at most {MAX_HEADER_BYTES} bytes, not {length}.")
    if len(head) < 8 + length:
        raise TensorFileTruncated(f"it ends in the header: {len(head)} bytes of {8 + length}.", 8 + length)
    return length


def _entries(head: Buffer, length: int) -> Iterator[tuple[str, TensorEntry]]:
    names = set[str]()
    for name, value in _items(bytes(head[8 : 8 + length])):
        if name in names:
            raise TensorFileError(f"its header has {printable(name)} twice.")
        names.add(name)
        if name != "__metadata__":
            yield name, _entry(name, value, 8 + length)


def _extent(data_start: int, spans: Mapping[str, tuple[int, int]]) -> int:
    position = data_start
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if start != position:
            raise TensorFileError(f"its tensors overlap or leave a gap at byte {position}, before {printable(name)}.")
        position = end
    return position


def printable(name: str) -> str:
    """A name out of a file as an error message shows it: escaped and not too long."""
    return repr(name if len(name) <= 160 else name[:120] + "…" + name[-40:])


_BLANK: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = json.JSONDecoder()


def _items(header: bytes) -> Iterator[tuple[str, object]]:
    """Keys and values of a JSON object, in their order."""
    try:
        text = header.decode("utf-8")
        position = _expect(text, 0, "{")
        if text[position : position + 1] == "}":
            _expect_end(text, position + 1)
            return
        while True:
            name, position = _decode(text, position, _MAX_ENTRY_CHARACTERS)
            if not isinstance(name, str):
                raise TensorFileError("its header is not JSON.")
            limit = _MAX_METADATA_CHARACTERS if name == "__metadata__" else _MAX_ENTRY_CHARACTERS
            value, position = _decode(text, _expect(text, position, ":"), limit)
            yield name, value
            position = _blank(text, position)
            if text[position : position + 1] == "}":
                _expect_end(text, position + 1)
                return
            position = _expect(text, position, ",")
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as exc:
        raise TensorFileError("its header is not JSON, or has an entry that is too long.") from exc


def _decode(text: str, position: int, limit: int) -> tuple[object, int]:
    value, length = _DECODER.raw_decode(text[position : position + limit])
    return value, position + length


def _blank(text: str, position: int) -> int:
    blank = _BLANK.match(text, position)
    assert blank is not None
    return blank.end()


def _expect(text: str, position: int, sign: str) -> int:
    """The position after the sign, where the next value begins."""
    position = _blank(text, position)
    if text[position : position + 1] != sign:
        raise TensorFileError(f"its header is not a JSON object: {sign!r} is missing at character {position}.")
    return _blank(text, position + 1)


def _expect_end(text: str, position: int) -> None:
    if _blank(text, position) != len(text):
        raise TensorFileError("its header is not JSON: something follows its end.")


def _entry(name: str, value: object, data_start: int) -> TensorEntry:
    if len(name) > MAX_NAME_CHARACTERS:
        raise TensorFileError(f"the name {printable(name)} has more than {MAX_NAME_CHARACTERS} characters.")
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]}:
            pass
        case _:
            raise TensorFileError(f"the header's entry of {printable(name)} is not a dtype, a shape and two offsets.")
    if dtype not in DTYPE_BYTES:
        raise TensorFileError(f"{printable(name)} has the unknown dtype {printable(dtype)}.")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end < _MAX_BYTES:
        raise TensorFileError(f"{printable(name)} has the data_offsets {[start, end]!r:.100}.")
    if len(shape) > 8 or not all(type(dimension) is int and 0 <= dimension < _MAX_BYTES for dimension in shape):
        raise TensorFileError(f"{printable(name)} has the shape {shape!r:.100}.")
    # A zero among the dimensions does not help: torch multiplies the others for the strides.
    if math.prod(dimension or 1 for dimension in shape) * DTYPE_BYTES[dtype] >= _MAX_BYTES:
        raise TensorFileError(f"{printable(name)} has the shape {shape!r:.100}, whose product is over 2^63.")
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - start != size:
        raise TensorFileError(f"{printable(name)} has {end - start} bytes, not the {size} of {dtype} {shape!r:.100}.")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)
