"""The regular expressions of a PEFT configuration, matched in bounded time.

`target_modules`, `exclude_modules` and the keys of `rank_pattern` and `alpha_pattern` are Python regular expressions
that come from whoever made the checkpoint; one line makes `re` backtrack for hours. This matcher follows all ways
through an expression at once, as sets of positions, and counts its steps. What it accepts means the same as in `re`;
what it does not know (back references, look-behind, flags) is refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

MAX_PATTERN_CHARACTERS: Final = 8192
_MAX_DEPTH: Final = 24
_MAX_REPEATS: Final = 10_000

Positions = frozenset[int]


class PatternRefused(ValueError):
    """The expression is malformed, not supported, or takes too many steps; the message is a predicate ("uses …")."""


class Budget:
    """How many steps all matching for one adapter may take. A usual expression takes about 100 for a module name."""

    def __init__(self, steps: int = 1_000_000) -> None:
        self._steps = steps

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise PatternRefused("takes too many steps to match")


@dataclass(frozen=True, slots=True)
class _Run:
    """One string being matched."""

    text: str
    budget: Budget


_Node = Callable[[_Run, Positions], Positions]  # where a match may begin -> where it may end
_Test = Callable[[str], bool]  # whether one character is accepted


class Pattern:
    """A compiled expression."""

    def __init__(self, text: str) -> None:
        """Raises `PatternRefused`."""
        if len(text) > MAX_PATTERN_CHARACTERS:
            raise PatternRefused(f"has {len(text)} characters, more than {MAX_PATTERN_CHARACTERS}")
        self._node = _Parser(text).parse()

    def fullmatch(self, name: str, budget: Budget) -> bool:
        """As `re.fullmatch`. Raises `PatternRefused` when the budget is spent."""
        return len(name) in self._node(_Run(name, budget), frozenset((0,)))

    def matches_end(self, name: str, budget: Budget) -> bool:
        """Whether the whole name, or all of it after one of its dots, matches: how PEFT looks up ranks and alphas."""
        starts = frozenset((0, *(i + 1 for i, character in enumerate(name) if character == ".")))
        return len(name) in self._node(_Run(name, budget), starts)


def _literal(text: str) -> _Node:
    def match(run: _Run, starts: Positions) -> Positions:
        run.budget.spend(len(starts))
        return frozenset(start + len(text) for start in starts if run.text.startswith(text, start))

    return match


def _one_of(accepts: _Test, weight: int = 1) -> _Node:
    def match(run: _Run, starts: Positions) -> Positions:
        run.budget.spend(len(starts) * weight)
        return frozenset(start + 1 for start in starts if start < len(run.text) and accepts(run.text[start]))

    return match


def _sequence(nodes: list[_Node]) -> _Node:
    def match(run: _Run, starts: Positions) -> Positions:
        for node in nodes:
            if not starts:
                break
            starts = node(run, starts)
        return starts

    return match


def _alternatives(nodes: list[_Node]) -> _Node:
    def match(run: _Run, starts: Positions) -> Positions:
        return frozenset[int]().union(*(node(run, starts) for node in nodes))

    return match


def _repeated(node: _Node, least: int, most: int | None) -> _Node:
    def match(run: _Run, starts: Positions) -> Positions:
        current = starts
        for _ in range(least):
            run.budget.spend(1)
            following = node(run, current)
            if following == current:  # a fixed point: more rounds change nothing
                break
            current = following
        found, fresh, count = current, current, least
        while fresh and (most is None or count < most):
            run.budget.spend(1)
            fresh = node(run, fresh) - found
            found, count = found | fresh, count + 1
        return found

    return match


def _where(holds: Callable[[_Run, int], bool]) -> _Node:
    def match(run: _Run, starts: Positions) -> Positions:
        run.budget.spend(len(starts))
        return frozenset(start for start in starts if holds(run, start))

    return match


def _ahead(node: _Node, *, wanted: bool) -> _Node:
    return _where(lambda run, start: bool(node(run, frozenset((start,)))) is wanted)


def _category(letter: str) -> _Test:
    compiled = re.compile(f"\\{letter}")
    return lambda character: compiled.fullmatch(character) is not None


_CATEGORIES: Final = {letter: _category(letter) for letter in "dDwWsS"}
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


def _is_word(run: _Run, position: int) -> bool:
    return 0 <= position < len(run.text) and _CATEGORIES["w"](run.text[position])


def _at_boundary(run: _Run, position: int) -> bool:
    return _is_word(run, position - 1) is not _is_word(run, position)


def _at_end(run: _Run, position: int) -> bool:
    return run.text[position:] in ("", "\n")


_ANCHORS: Final[Mapping[str, _Node]] = {
    "^": _where(lambda run, position: position == 0),
    "$": _where(_at_end),
    r"\b": _where(_at_boundary),
    r"\B": _where(lambda run, position: run.text != "" and not _at_boundary(run, position)),
    r"\A": _where(lambda run, position: position == 0),
    r"\Z": _where(lambda run, position: position == len(run.text)),
}
_SIGNS: Final[Mapping[str, _Node]] = {
    **_ANCHORS,
    ".": _one_of(lambda character: character != "\n"),
    **{f"\\{letter}": _one_of(test) for letter, test in _CATEGORIES.items()},
}
_QUANTIFIER: Final = re.compile(r"(?:([*+?])|\{(?!\})(\d*)(,?)((?<=,)\d*|)\})([?+]?)")
_GROUP: Final = re.compile(r"\?P<[A-Za-z_]\w*>|\?:")
_RANGES: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Parser:
    """Recursive descent over one expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        node = self._expression()
        if self._at < len(self._text):
            raise PatternRefused("has an unbalanced parenthesis")
        return node

    def _take(self, prefix: str) -> bool:
        if self._text.startswith(prefix, self._at):
            self._at += len(prefix)
            return True
        return False

    def _next(self) -> str:
        """The next character, empty at the end."""
        character = self._text[self._at : self._at + 1]
        self._at += 1
        return character

    def _expression(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternRefused(f"nests deeper than {_MAX_DEPTH}")
        branches = [_sequence(list(self._items()))]
        while self._take("|"):
            branches.append(_sequence(list(self._items())))
        self._depth -= 1
        return branches[0] if len(branches) == 1 else _alternatives(branches)

    def _items(self) -> Iterator[_Node]:
        """Consecutive literal characters become one node: most of any real expression is literal."""
        literal = ""
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if _QUANTIFIER.match(self._text, self._at):
                raise PatternRefused("repeats nothing")
            atom = self._atom()
            quantifier = _QUANTIFIER.match(self._text, self._at)
            if isinstance(atom, str) and quantifier is None:
                literal += atom
                continue
            if literal:
                yield _literal(literal)
                literal = ""
            node = _literal(atom) if isinstance(atom, str) else atom
            if quantifier is not None and node in _ANCHORS.values():
                raise PatternRefused("repeats nothing")
            yield node if quantifier is None else self._quantified(node, quantifier)
        if literal:
            yield _literal(literal)

    def _quantified(self, node: _Node, quantifier: re.Match[str]) -> _Node:
        sign, least, comma, most, mode = quantifier.groups()
        if mode == "+":
            raise PatternRefused("uses a possessive quantifier")
        self._at = quantifier.end()
        if _QUANTIFIER.match(self._text, self._at):
            raise PatternRefused("repeats a repetition")
        if sign:
            low, high = _RANGES[sign]
        else:
            low = _repeats(least or "0")
            high = _repeats(most) if most else (None if comma else low)
        if high is not None and high < low:
            raise PatternRefused("has a repetition whose bounds are reversed")
        return _repeated(node, low, high)

    def _atom(self) -> _Node | str:
        character = self._next()
        match character:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                escaped = self._next()
                sign = _SIGNS.get(f"\\{escaped}")
                return _plain(escaped) if sign is None else sign
            case _:
                return _SIGNS.get(character, character)

    def _group(self) -> _Node:
        wanted: bool | None = None
        if self._take("?=") or self._take("?!"):
            wanted = self._text[self._at - 1] == "="
        elif opening := _GROUP.match(self._text, self._at):
            self._at = opening.end()
        elif self._take("?"):
            raise PatternRefused("uses a group that is not supported here")
        node = self._expression()
        if not self._take(")"):
            raise PatternRefused("has an unbalanced parenthesis")
        return node if wanted is None else _ahead(node, wanted=wanted)

    def _class(self) -> _Node:
        negated = self._take("^")
        characters, tests = set[str](), list[_Test]()
        first = True
        while first or not self._take("]"):
            first = False
            item = self._class_item()
            if isinstance(item, str):
                characters.add(item)
            else:
                tests.append(item)
        return _one_of(
            lambda c: (c in characters or any(test(c) for test in tests)) is not negated, weight=1 + len(tests)
        )

    def _class_item(self) -> str | _Test:
        low = self._class_character()
        rest = self._text[self._at : self._at + 2]
        if not rest.startswith("-") or rest in ("-]", "-"):
            return low
        self._at += 1
        high = self._class_character()
        if not isinstance(low, str) or not isinstance(high, str) or high < low:
            raise PatternRefused("has a bad range of characters")
        return lambda c: low <= c <= high

    def _class_character(self) -> str | _Test:
        character = self._next()
        if not character:
            raise PatternRefused("has an unbalanced bracket")
        if character != "\\":
            return character
        escaped = self._next()
        return _CATEGORIES[escaped] if escaped in _CATEGORIES else _plain(escaped)


def _plain(escaped: str) -> str:
    if escaped in _CONTROLS:
        return _CONTROLS[escaped]
    if not escaped or (escaped.isascii() and escaped.isalnum()):
        raise PatternRefused(f"uses the escape \\{escaped}")
    return escaped


def _repeats(digits: str) -> int:
    if len(digits) > 5 or int(digits) > _MAX_REPEATS:
        raise PatternRefused(f"repeats more than {_MAX_REPEATS} times")
    return int(digits)
