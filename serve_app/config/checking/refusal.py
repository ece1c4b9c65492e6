"""An error in a configuration: its path, and one sentence that gives the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from serve_app.base.errors import ConfigRefused
from serve_app.base.explain import Complaint, explain, near, path_of
from serve_app.config.checking.option import names_at

RENAMED: Final[Mapping[str, str]] = {
    "least_busy": "load_floor",
    "limits.stop_length": "stop_characters",
}
"""Renamed keys: old path -> new name. An old key is refused, and the message gives the new name."""

SECTIONS: Final = ("models", "checkpoints", "images", "keys", "limits", "marketplace", "ledger", "config")
_UNKNOWN: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
Location = tuple[int | str, ...]
_S = TypeVar("_S", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Refusal:
    """`path`: `models[1].source`; empty for the whole. `sentence` names it too."""

    path: str
    sentence: str

    @property
    def part(self) -> str:
        """The part of the configuration that is refused: `models[1]`."""
        return self.path.partition(".")[0]

    @property
    def section(self) -> str:
        """One of `SECTIONS`; the last one for anything outside the others."""
        name = self.part.partition("[")[0]
        return name if name in SECTIONS else SECTIONS[-1]

    def __str__(self) -> str:
        return self.sentence


def parse_section(kind: type[_S], raw: object, whole: str) -> _S:
    """The section, checked; `whole`: its name when it has no path. Raises `ConfigRefused` with the first reason."""
    try:
        return kind.model_validate(raw)
    except ValidationError as exc:
        raise ConfigRefused(refusals(exc, kind, whole)[0].sentence) from exc


def refusals(exc: ValidationError, root: type, whole: str, at: Location = ()) -> list[Refusal]:
    """One refusal for each error. `root`: the validated section; `at`: its path; `whole`: its name when it has no
    path.
    """
    return [_refusal(error, root, whole, at) for error in exc.errors(include_url=False)]


def _refusal(error: ErrorDetails, root: type, whole: str, at: Location) -> Refusal:
    location: Location = (*at, *error["loc"])
    if error["type"] in _UNKNOWN:
        path = path_of(location)
        return Refusal(path, f"{path} {_unknown(str(location[-1]), location, names_at(root, error['loc']))}")
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ValueError) and not isinstance(cause, Complaint):  # a sentence already
        return Refusal(path_of(location), str(cause))
    placed: ErrorDetails = {**error, "loc": location}
    return Refusal(*explain(placed, whole))


def _unknown(name: str, location: Location, known: list[str]) -> str:
    new = RENAMED.get(path_of(part for part in location if isinstance(part, str)))
    if new is not None:
        return f"is now called {new}."
    if hint := near(name, known, most=1):
        return f"is not a known key.{hint}"
    return f"is not a known key; the keys here are {', '.join(known)}." if known else "is not a known key."
