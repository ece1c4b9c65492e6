"""The regular expressions of a PEFT configuration, matched in bounded time.

`target_modules`, `exclude_modules` and the keys of `rank_pattern` and `alpha_pattern` are Python regular expressions
that come from whoever made the checkpoint; `re` can be made to backtrack for hours by one line. This matcher follows
all ways through the expression at once, as sets of positions, and counts its steps. What it accepts means the same as
in `re`; what it does not know (back references, look-behind, flags) is refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

MAX_PATTERN_CHARACTERS: Final = 8192
_MAX_DEPTH: Final = 24

Positions = frozenset[int]


class PatternRefused(ValueError):
    """The expression is malformed, not supported, or takes too many steps; the message says which."""


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


# A node maps where its match may begin to where it may end.
_Node = Callable[[_Run, Positions], Positions]
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
        """Whether the whole name or what follows one of its dots matches: how PEFT looks up ranks and alphas."""
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
        return frozenset().union(*(node(run, starts) for node in nodes))

    return match


def _repeated(node: _Node, least: int, most: int | None) -> _Node:
    def match(run: _Run, starts: Positions) -> Positions:
        current = starts
        for _ in range(least):
            following = node(run, current)
            run.budget.spend(1)
            if following == current:  # only the empty string is left to match
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


def _is_word(run: _Run, position: int) -> bool:
    return 0 <= position < len(run.text) and re.fullmatch(r"\w", run.text[position]) is not None


def _at_boundary(run: _Run, position: int) -> bool:
    return _is_word(run, position - 1) is not _is_word(run, position)


def _at_end(run: _Run, position: int) -> bool:
    return position == len(run.text) or (position == len(run.text) - 1 and run.text[position] == "\n")


def _repeats(digits: str) -> int:
    if len(digits) > 5 or int(digits) > _MAX_REPEATS:
        raise PatternRefused(f"repeats more than {_MAX_REPEATS} times")
    return int(digits)
