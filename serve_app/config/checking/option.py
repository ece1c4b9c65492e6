"""One option of the configuration, as its section declares it: name, type with limits, default, sentence."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typing_extensions import Doc

REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Option:
    """`hint` is the type without the sentence; `default` may be `REQUIRED`; `section` is the type of the object, or of
    the objects of the list, that the option holds.
    """

    name: str
    hint: Any
    default: object
    sentence: str
    section: type | None


def options_of(section: type) -> Iterator[Option]:
    """The options of a pydantic model or of a dataclass, in the order in which they are declared."""
    hints, defaults = get_type_hints(section, include_extras=True), _defaults(section)
    for name, default in defaults.items():
        hint, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        sentence = next((note.documentation for note in notes if isinstance(note, Doc)), "")
        limits = [note for note in notes if not isinstance(note, Doc)]
        yield Option(name, Annotated[hint, *limits] if limits else hint, default, sentence, _section_in(hint))


def names_at(section: type, location: tuple[int | str, ...]) -> list[str]:
    """The names of the options beside the one at a location."""
    for name in location[:-1]:
        if isinstance(name, str):
            inner = next((option.section for option in options_of(section) if option.name == name), None)
            if inner is None:
                return []
            section = inner
    return [option.name for option in options_of(section)]


def _defaults(section: type) -> dict[str, object]:
    raw: dict[str, object]
    if issubclass(section, BaseModel):
        raw = {name: option.default for name, option in section.model_fields.items()}
    else:
        assert is_dataclass(section)
        raw = {option.name: option.default for option in fields(section)}
    return {name: REQUIRED if value is MISSING or value is PydanticUndefined else value for name, value in raw.items()}


def _section_in(hint: Any) -> type | None:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next(filter(None, map(_section_in, get_args(hint))), None)
