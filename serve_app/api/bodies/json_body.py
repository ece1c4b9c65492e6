"""The request body, from bytes to JSON values; ignored fields are dropped on the way.

Strict: UTF-8 without lone surrogates, no NaN or Infinity, nesting up to 200, nothing after the value. If an object
repeats a key, the last one wins, as in most JSON readers. Ignored values are checked like the rest, but no Python
object is built: one takes about 30 times the memory of its text. Each call of the JSON reader gets at most about 20 ms
of work, because it blocks all other threads.
"""

from dataclasses import dataclass, field

import numpy as np
from pydantic_core import from_json

from serve_app.api.bodies.ignored_fields import Known
from serve_app.api.prompts.prompt_limits import LONGEST_WINDOW, too_long
from serve_app.base.errors import InvalidRequest
from serve_app.base.json_structure import COLON, Structure, without_collections

JsonObject = dict[str, object]

_SMALL_BYTES = 1 << 16  # it is read as it is
_MAX_VALUES = 100_000  # besides tokens; no conversation that fits a context has so many
_MAX_DEPTH = 200
_KEPT_BYTES = 64  # an ignored value that is shorter costs less than to cut it out
_CHECKED_BYTES = 1 << 17  # at a time
_TOKEN_LISTS = frozenset({"prompt", "tokens"})


def parse_object(content: bytes, names: Known | None = None, *, longest_context: int = 0) -> JsonObject:
    """Parse a body that must be an object. `names`: the fields that are read, at every level; None for all. A long
    value under another name is dropped and its name kept. `longest_context`: of all models, in tokens. Raises
    `InvalidRequest`.
    """
    is_large = len(content) > _SMALL_BYTES
    try:
        with without_collections():
            if is_large:
                content = _without_ignored(content, names, longest_context)
            value = from_json(content, allow_inf_nan=False)
    except ValueError as exc:
        # After a cut the position of an error in the original text is unknown.
        reason = str(exc).rpartition(" at line ")[0] if is_large else str(exc)
        raise InvalidRequest(f"The request body is not valid JSON: {reason or exc}.") from exc
    if not isinstance(value, dict):
        given = _KINDS.get(type(value), "a value")
        raise InvalidRequest(f"The request body must be a JSON object, got {given}.")
    return value


_KINDS = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def _without_ignored(content: bytes, names: Known | None, longest_context: int) -> bytes:
    """Raises `ValueError` for some malformed JSON; the JSON reader finds the rest in the result."""
    structure = Structure.of(content)
    last = len(structure.kinds) - 1
    if structure.deepest > _MAX_DEPTH:
        raise InvalidRequest(f"The request body must be nested at most {_MAX_DEPTH} deep, got {structure.deepest}.")
    if not structure.is_balanced or names is None or structure.kinds[0] != ord("{"):
        _check_number(structure.num_values(-1, last + 1))
        return content
    cutter = _Cutter(content, structure, longest_context)
    cutter.cut(0, last, names)
    _check_number(structure.num_values(-1, last + 1) - cutter.num_cut)
    return cutter.rest()


def _check_number(count: int) -> None:
    if count > _MAX_VALUES:
        raise InvalidRequest(f"The request body must have at most {_MAX_VALUES} values that are read, got {count}.")


@dataclass(slots=True)
class _Cutter:
    """Finds ignored values, checks them, and cuts them out. `num_cut`: values that are not read, or are tokens."""

    content: bytes
    structure: Structure
    longest_context: int
    num_cut: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)

    def cut(self, opening: int, closing: int, names: Known) -> None:
        """Cut the ignored values of an object, or of the objects in a list."""
        structure = self.structure
        _check_number(len(structure.separators(opening, closing)))
        is_object = structure.kinds[opening] == ord("{")
        for before, after in structure.items(opening, closing):
            if is_object:
                self._cut_member(before, after, names)
            elif after - before > 1 and structure.is_opening(before + 1):
                self.cut(before + 1, after - 1, names)

    def rest(self) -> bytes:
        pieces, end = [], 0
        for start, stop in self.spans:
            pieces += [self.content[end:start], b"0"]
            end = stop
        return b"".join((*pieces, self.content[end:]))

    def _cut_member(self, before: int, after: int, names: Known) -> None:
        structure, colon = self.structure, before + 1
        if colon >= after or structure.kinds[colon] != COLON:
            return  # there is no member, or it is no JSON
        name, (start, end) = self._name(before, colon), self._span(colon, after)
        if not isinstance(name, str) or name not in names:
            if end - start > _KEPT_BYTES and self.content[start:end].strip() != b"null":
                self._check(colon, after)
                self.spans.append((start, end))
                self.num_cut += structure.num_values(colon, after) - 1
        elif (inner := names[name]) is not None:
            if after - colon > 1 and structure.is_opening(colon + 1):
                self.cut(colon + 1, after - 1, inner)
        elif name in _TOKEN_LISTS and structure.is_opening(colon + 1):
            count = structure.num_commas(colon, after) + 1
            if count > self.longest_context:
                path = "prompt" if name == "prompt" else "prompt_chunks"
                raise too_long(path, self.longest_context, str(count), window=LONGEST_WINDOW)
            self.num_cut += count

    def _check(self, before: int, after: int) -> None:
        """Check an ignored value in pieces: one long call would block all other requests. Raises `ValueError`."""
        structure, (start, end) = self.structure, self._span(before, after)
        opening, closing = before + 1, after - 1
        if end - start <= _CHECKED_BYTES or opening >= after or not structure.is_opening(opening):
            from_json(self.content[start:end], allow_inf_nan=False)
            return
        brackets = bytes(structure.kinds[[opening, closing]].tolist())
        outside = self.content[start : int(structure.positions[opening])], self._text(closing, after)
        if brackets not in (b"[]", b"{}") or any(text.strip() for text in outside):
            raise ValueError("expected a value")
        separators = np.concatenate(([opening], structure.separators(opening, closing), [closing]))
        positions = structure.positions[separators]
        place, last = 0, len(separators) - 1
        while place < last:
            up_to = int(np.searchsorted(positions, positions[place] + _CHECKED_BYTES, "right")) - 1
            if up_to > place:
                self._check_items(brackets, separators[place], separators[up_to], is_all=(place, up_to) == (0, last))
            else:
                up_to = place + 1
                self._check_item(brackets, int(separators[place]), int(separators[up_to]))
            place = up_to

    def _check_items(self, brackets: bytes, before: int, after: int, *, is_all: bool) -> None:
        text = self._text(before, after)
        if not text.strip() and not is_all:
            raise ValueError("trailing comma")
        from_json(b"%c%b%c" % (brackets[0], text, brackets[1]), allow_inf_nan=False)

    def _check_item(self, brackets: bytes, before: int, after: int) -> None:
        if brackets == b"{}":
            if self.structure.kinds[before + 1] != COLON or not isinstance(self._name(before, before + 1), str):
                raise ValueError("expected a name")
            before += 1
        self._check(before, after)

    def _name(self, before: int, colon: int) -> object:
        return from_json(self._text(before, colon))

    def _text(self, before: int, after: int) -> bytes:
        start, end = self._span(before, after)
        return self.content[start:end]

    def _span(self, before: int, after: int) -> tuple[int, int]:
        return int(self.structure.positions[before]) + 1, int(self.structure.positions[after])
