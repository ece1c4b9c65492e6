"""The regular expressions of a PEFT configuration, matched in bounded time and memory.

`target_modules`, `exclude_modules` and the keys of `rank_pattern` and `alpha_pattern` are Python regular expressions
from the author of the checkpoint. One line can make `re` backtrack for hours. The `regex` package has a time limit for
matching, but none for compiling. It copies what is repeated, so `((((a)+)+)+)+` takes twice the memory with each level.
So an expression is weighed before it is compiled.

An expression means the same as for `re`, or it is refused. `re` compiles it first. What the two packages read
differently is refused: escapes by number or name, references, comments, `(?x)`, possessive quantifiers, sets within
sets, other braces than `{m,n}`.
"""

import re
import time
from collections.abc import Callable
from typing import Final

import regex

MAX_PATTERN_CHARACTERS: Final = 8192
_MAX_DEPTH: Final = 24
_MAX_WEIGHT: Final = 20_000
_MATCH_S: Final = 0.05  # a usual match takes 5 µs; some expressions take 0.5 GB of memory for each second of matching

_TOKEN: Final = re.compile(
    r"""(?P<escape> \\.? )
    | (?P<set> \[\^?\]?(?:\\.|[^\]\\])*\] )
    | (?P<flags> \(\?[a-zA-Z-]*\) )
    | (?P<opening> \((?:\?(?:P<|<?[=!]|[a-zA-Z-]*:?))? )
    | (?P<closing> \) )
    | (?P<possessive> (?:[*+?]|\{\d*,?\d*\})\+ )
    | (?P<repeated> \+|\{(?P<least>\d{1,5})(?:,\d{0,5})?\} )
    | (?P<optional> [*?]|\{,\d{1,5}\} )
    | (?P<plain> [\x20-z|}~] )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES: Final = frozenset("dDwWsSbBAZntrfva")
_SET_OPERATION: Final = re.compile(r"--|&&|~~|\|\||\[")
_FLAGS: Final = re.compile(r"\(\?[aimsu]*(?:-[ims]+)?[:)]")
_GROUPS: Final = frozenset({"(", "(?P<", "(?=", "(?!", "(?<=", "(?<!"})


class PatternRefused(ValueError):
    """The expression is malformed, not supported, or takes too much; the message is a predicate ("uses …")."""


class Budget:
    """Limits for all expressions of one adapter together: CPU seconds of the thread that matches, and weight. One unit
    of weight is up to 300 bytes and 10 µs of compiling.
    """

    def __init__(self, *, seconds: float = 2.0, weight: int = 200_000) -> None:
        self._seconds = seconds
        self._weight = weight

    def spend_weight(self, weight: int) -> None:
        self._weight -= weight
        if self._weight < 0:
            raise PatternRefused("is too much to compile, with the expressions before it")

    def spend_seconds(self, seconds: float) -> None:
        self._seconds -= seconds
        if self._seconds < 0:
            raise PatternRefused("takes too long to match, with the expressions before it")


class Pattern:
    """A compiled expression."""

    def __init__(self, text: str, budget: Budget) -> None:
        """Raises `PatternRefused`."""
        budget.spend_weight(_weight(text))
        self._budget = budget
        try:
            re.compile(text)
            self._compiled = regex.compile(text, regex.VERSION0, cache_pattern=False)
        except (re.error, regex.error, OverflowError, RecursionError) as exc:
            raise PatternRefused(f"is not a regular expression: {exc}") from exc

    def fullmatch(self, name: str) -> bool:
        """As `re.fullmatch`. The name is of printable ASCII. Raises `PatternRefused` when it takes too long."""
        return self._bounded(self._compiled.fullmatch, name)

    def match(self, name: str) -> bool:
        """As `re.match`; otherwise as `fullmatch`."""
        return self._bounded(self._compiled.match, name)

    def _bounded(self, matches: Callable[..., object], name: str) -> bool:
        own = 0.0
        while own < _MATCH_S:
            started = time.thread_time()
            try:
                return matches(name, timeout=_MATCH_S) is not None
            except TimeoutError:
                pass  # its clock is the whole process': other threads may have used the time
            except MemoryError as exc:
                raise PatternRefused("takes too much memory to match") from exc
            finally:
                spent = time.thread_time() - started
                own += spent
                self._budget.spend_seconds(spent)
        raise PatternRefused(f"takes too long to match {name!r}")


def _weight(text: str) -> int:
    """The length of the expression with every repeated part written out. Raises `PatternRefused`."""
    if len(text) > MAX_PATTERN_CHARACTERS:
        raise PatternRefused(f"has {len(text)} characters, more than {MAX_PATTERN_CHARACTERS}")
    sums, item, end = [0], 0, 0
    for token in _TOKEN.finditer(text):
        if token.start() != end:
            break
        end = token.end()
        item = _item(token, sums, item)
        if len(sums) > _MAX_DEPTH + 1:
            raise PatternRefused(f"nests deeper than {_MAX_DEPTH}")
        if sums[-1] > _MAX_WEIGHT:
            raise PatternRefused(f"repeats so much that it is {sums[-1]} characters, more than {_MAX_WEIGHT}")
    if end != len(text):
        raise PatternRefused(f"uses {text[end]!r} at position {end}, which is not supported there")
    return sum(sums)


def _item(token: re.Match[str], sums: list[int], item: int) -> int:
    """Adds the token to `sums`, the weights of the open groups. `item`: the weight that a repetition here would repeat.
    Returns the weight that a repetition after the token would repeat.
    """
    _check(token)
    match token.lastgroup:
        case "opening":
            sums.append(len(token[0]))
            return 0
        case "closing":
            if len(sums) == 1:
                raise PatternRefused("is not a regular expression: unbalanced parenthesis")
            item = sums.pop() + 1
            sums[-1] += item
            return item
        case "repeated" | "least":
            more = item * int(token["least"] or 1)
            sums[-1] += more
            return item + more
        case "optional":
            return item
        case _:
            sums[-1] += len(token[0])
            return len(token[0])


def _check(token: re.Match[str]) -> None:
    """Refuses what `re` and `regex` may read differently."""
    text = token[0]
    escape = text[1:] if token["escape"] else ""
    if (escape.isalnum() and escape not in _ESCAPES) or not escape.isascii():
        raise PatternRefused(f"uses the escape {text}")
    if token["set"]:
        _check_set(text)
    if token["possessive"]:
        raise PatternRefused(f"uses the possessive quantifier {text}")
    is_group = token["opening"] or token["flags"]
    if is_group and text not in _GROUPS and not _FLAGS.fullmatch(text):
        raise PatternRefused(f"uses {text}, which is not supported")


def _check_set(text: str) -> None:
    for escape in re.findall(r"\\(.)", text, re.DOTALL):
        if escape.isalnum() and escape not in _ESCAPES:
            raise PatternRefused(f"uses the escape \\{escape}")
    if not text.isascii() or _SET_OPERATION.search(re.sub(r"\\.", "", text[1:], flags=re.DOTALL)):
        raise PatternRefused(f"uses the set {text!r:.60}, which is not supported")
