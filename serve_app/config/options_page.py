"""The page that lists every option of config.yaml, made from the types that check it: `OPTIONS.md`."""

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MultipleOf
from pydantic import AwareDatetime, BaseModel, StringConstraints

from engines.interface.config import EngineOptions, limits_of
from serve_app.config.api import ApiArgs
from serve_app.config.checking.option import REQUIRED, Option, options_of
from serve_app.config.images import ImageArgs
from serve_app.config.keys import KeyLimits
from serve_app.config.model import ModelArgs
from serve_app.config.service import ServiceConfig

PAGE: Final = Path(__file__).with_name("OPTIONS.md")

_INTRODUCTION: Final = """\
# Options of config.yaml

Every option, its range, its default and what it does. Unknown keys and values out of range are refused with one
sentence. Sizes are in bytes, times in seconds, lengths in tokens. `…[]` means each item of a list.

`python -m serve_app options` prints this page from the types that check the configuration, and a test compares the two.
"""
_ROOTS: Final[Mapping[str, tuple[type, str]]] = {
    "`user_config`: what is served": (
        ServiceConfig,
        "Of the deployment `ingress` in the application with `import_path: serve_app.app:api`.\n"
        "A change takes effect within seconds and restarts nothing.",
    ),
    "`args` of the API": (
        ApiArgs,
        "Of the application with `import_path: serve_app.app:api`. A change restarts the ingress.",
    ),
    "`args` of a model": (
        ModelArgs,
        "Of each application with `import_path: serve_app.app:model`. A change restarts the replicas of that model.",
    ),
    "`args` of the images": (
        ImageArgs,
        "Of the application with `import_path: serve_app.app:images`. A change restarts its processes.",
    ),
}
_HEAD: Final = ("| option | value | default | meaning |", "|---|---|---|---|")
_PLAIN: Final[Mapping[Any, str]] = {
    int: "integer",
    float: "number",
    str: "text",
    Decimal: "number",
    bool: "true or false",
    AwareDatetime: "time with zone",
}


def options_page() -> str:
    parts = [_INTRODUCTION]
    for title, (root, where) in _ROOTS.items():
        parts.append(f"## {title}\n\n{where}\n")
        for heading, rows in _tables(root):
            parts += [f"### {heading}\n"] if heading else []
            parts.append("\n".join((*_HEAD, *rows, "")))
    return "\n".join(parts)


def _tables(root: type) -> Iterator[tuple[str, list[str]]]:
    """The rows of each section with its heading. The engine's options of a model application come in a table of their
    own.
    """
    of_engine = {option.name for option in options_of(EngineOptions)} - {"source"}
    for path, section in _sections("", root):
        rows = {option.name: _row(option, section) for option in options_of(section)}
        heading = f"`{path}`" if path else ""
        if section is not ModelArgs:
            yield heading, list(rows.values())
            continue
        yield heading, [row for name, row in rows.items() if name not in of_engine]
        yield "Those of its engine", [row for name, row in rows.items() if name in of_engine]


def _sections(path: str, section: type) -> Iterator[tuple[str, type]]:
    """The section and its subsections, each with its path."""
    yield path, section
    for option in options_of(section):
        if option.section is not None:
            items = "[]" if _is_list(option.hint) else ""
            yield from _sections(f"{path}.{option.name}{items}".removeprefix("."), option.section)


def _is_list(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _is_list(get_args(hint)[0])
    return get_origin(hint) is tuple


def _row(option: Option, section: type) -> str:
    default = "as in `limits.per_key`" if section is KeyLimits else _default(option)
    return f"| `{option.name}` | {_kind(option.hint)} | {default} | {option.sentence} |"


def _kind(hint: Any) -> str:
    """The type in words."""
    origin, members = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "object"
    if origin is Annotated:
        return _limited(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in members)
    if origin is tuple:
        return f"list of {_plural(_kind(members[0]))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"object of {_plural(_kind(members[1]))}"
    assert type(None) in members, hint
    kinds = [_kind(member) if member is not type(None) else "null" for member in members]
    return (", or " if "," in kinds[0] else " or ").join(kinds)


def _limited(hint: Any) -> str:
    inner, *notes = get_args(hint)
    words = [_kind(inner)]
    limits: dict[type, Any] = {type(limit): limit for limit in limits_of(Annotated[inner, *notes])}
    least, above, most = limits.get(Ge), limits.get(Gt), limits.get(Le)
    if least is not None and most is not None:
        words.append(f"{least.ge} to {most.le}")
    else:
        words += [f"at least {least.ge}"] if least is not None else []
        words += [f"above {above.gt}"] if above is not None else []
        words += [f"at most {most.le}"] if most is not None else []
    if (unit := limits.get(MultipleOf)) is not None:
        words.append(f"a multiple of {unit.multiple_of}")
    words += [f"like `{note.pattern}`" for note in notes if isinstance(note, StringConstraints)]
    return ", ".join(dict.fromkeys(words))


def _plural(kind: str) -> str:
    name, comma, rest = kind.partition(",")
    return f"{name}s{comma}{rest}"


def _default(option: Option) -> str:
    value = option.default
    if value is REQUIRED:
        return "required"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    shown = f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"
    return f"{shown} ({_size(value)})" if option.name.endswith("_bytes") and isinstance(value, int) else shown


def _size(value: int) -> str:
    return f"{value >> 30} GiB" if value >= 1 << 30 else f"{value >> 20} MiB"
