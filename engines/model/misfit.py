"""Weights that do not fit their model: which tensor of which file it is, for a message."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from engines.interface.errors import ModelRefused

_EXPERT = re.compile(r"(\.experts\.)\d+\.")

Shape = tuple[int, ...]


def check_fit(source: str, folder: str, loading: Mapping[str, Any]) -> None:
    """`loading`: what transformers says about the load. It fills tensors that are missing or of another shape with
    random numbers. Raises `ModelRefused` for these.
    """
    wrong = sorted(loading["mismatched_keys"])
    if wrong:
        name, found, expected = wrong[0]
        raise ModelRefused(
            f"{source!r} cannot be loaded: {_in_file(Path(folder), name, tuple(found))} has the shape {list(found)}, "
            f"its configuration asks for {list(expected)}{_more(len(wrong))}."
        )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelRefused(f"{source!r} cannot be loaded: its weights lack {missing[0]!r}{_more(len(missing))}.")


def odd_expert(folder: str) -> str | None:
    """An expert's tensor of another shape than those of most other experts, with its file."""
    tensors = list(_tensors(Path(folder)))
    shapes = Counter((_EXPERT.sub(r"\1*.", name), shape) for _, name, shape in tensors)
    usual = {kind: shape for (kind, shape), _ in reversed(shapes.most_common())}
    for file, name, shape in tensors:
        expected = usual[_EXPERT.sub(r"\1*.", name)]
        if shape != expected:
            return f"{name!r} in {file} has the shape {list(shape)}, that of other experts has {list(expected)}"
    return None


def _in_file(folder: Path, name: str, shape: Shape) -> str:
    """The tensor as its file names it. The model's name ends alike, or it is made of several tensors."""
    alike = [(_common_end(name, theirs), theirs, file) for file, theirs, size in _tensors(folder) if size == shape]
    length, theirs, file = max(alike, default=(0, "", ""))
    return f"{theirs!r} in {file}" if length > 1 else repr(name)


def _common_end(first: str, second: str) -> int:
    """How many parts of two names are the same, from the end."""
    parts = zip(reversed(first.split(".")), reversed(second.split(".")), strict=False)
    return next((place for place, (a, b) in enumerate(parts) if a != b), min(first.count("."), second.count(".")) + 1)


def _tensors(folder: Path) -> Iterator[tuple[str, str, Shape]]:
    """(file, tensor, shape) of all files of safetensors in a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield file.name, name, tuple(tensors.get_slice(name).get_shape())


def _more(count: int) -> str:
    return f", and {count - 1} more do not fit" if count > 1 else ""
