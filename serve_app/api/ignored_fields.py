"""The fields of a body that have no effect: their names, found while the body is parsed. Their values are dropped."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

MAX_NAMES = 32

Known: TypeAlias = Mapping[str, "Known | None"]
"""The names that an object may have, and for each those in its value, which is such an object or a list of them. None:
the value is taken as a whole."""


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """The first names, as paths, and how many more distinct ones there are."""

    names: tuple[str, ...] = ()
    more: int = 0


def known(names: Mapping[str, object], **inner: Known) -> Known:
    """`names` as a model's fields, those in `inner` with names of their own."""
    return {**dict.fromkeys(names), **inner}


def ignored_fields(body: Mapping[str, object], names: Known) -> IgnoredFields:
    """null means unset, so a field that is null is none."""
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
