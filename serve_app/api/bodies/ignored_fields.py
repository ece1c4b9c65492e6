"""The names of a body's fields that have no effect, collected while the body is parsed. Their values are dropped."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

MAX_NAMES = 32

Known: TypeAlias = Mapping[str, "Known | None"]
"""The keys that an object may have. Each maps to the keys of its value, an object or a list of objects; None: the whole
value is read.
"""


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """The first ignored names, as paths, and the number of further distinct ones."""

    names: tuple[str, ...] = ()
    more: int = 0


def known(names: Mapping[str, object], **inner: Known) -> Known:
    """`names` as a model's fields; those in `inner` have known keys too."""
    return {**dict.fromkeys(names), **inner}


def ignored_fields(body: Mapping[str, object], names: Known) -> IgnoredFields:
    """The ignored fields of a body. null means unset, so a null field does not count."""
    distinct = dict.fromkeys(_paths(body, names, ""))
    return IgnoredFields(tuple(distinct)[:MAX_NAMES], max(0, len(distinct) - MAX_NAMES))


def _paths(value: object, names: Known, at: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _paths(item, names, f"{at}[]")
    elif isinstance(value, dict):
        before = f"{at}." if at else ""
        yield from (f"{before}{name}" for name, inner in value.items() if inner is not None and name not in names)
        for name, inner_names in names.items():
            if inner_names is not None and name in value:
                yield from _paths(value[name], inner_names, f"{before}{name}")
