"""Limits of one rendering of a chat template: characters, nesting, time.

A value's weight is about its length when printed in full. Shared parts count as often as they would be printed (`[x,
x]` weighs twice `x`), because printing, comparing and hashing visit them that often. Ten lines of a template can make a
list of 2**40 items out of two pointers a line. Containers cannot change in the sandbox, so each is weighed once.
"""

import gc
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from jinja2.exceptions import TemplateError

_VALUE_LEN, _VALUE_LEN_PER_INPUT_CHAR = 4_000_000, 16
_TOTAL_LEN, _TOTAL_LEN_PER_INPUT_CHAR = 32_000_000, 64
_TIME_S, _TIME_S_PER_INPUT_CHAR = 0.5, 1e-6
_LOOK_EVERY_S = 0.005
_INT_BITS = 4096
_ITEM_LEN = 8
"""What an item counts at least: a pointer."""

# By their own types: the abstract classes of views take ten times as long to ask.
_DICT_VIEWS = frozenset((type({}.keys()), type({}.values()), type({}.items())))

_Value = TypeVar("_Value")


class TooMuch(TemplateError):
    """The template exceeded a limit; the message names it."""


class _Collections:
    """Processor time that garbage collections took so far. One in a large process takes as long as a rendering may. The
    thread that happens to trigger it pays for it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_s = 0.0
        gc.callbacks.append(self._count)

    def _count(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began_s


_COLLECTIONS = _Collections()


class RenderBudget:
    """The limits of one rendering: of a value, of all values together, and of this thread's processor time without
    garbage collections.

    All are in proportion to the weight of what was `given` to the template.
    """

    def __init__(self, given: object) -> None:
        # By id; the value is kept so that its id stays its own.
        self._weights: dict[int, tuple[object, int]] = {}
        input_len = self.weigh(given)
        self._max_value = _VALUE_LEN + _VALUE_LEN_PER_INPUT_CHAR * input_len
        self._max_total = _TOTAL_LEN + _TOTAL_LEN_PER_INPUT_CHAR * input_len
        self._limit_s = _TIME_S + _TIME_S_PER_INPUT_CHAR * input_len
        self._end_s = time.thread_time() - _COLLECTIONS.seconds + self._limit_s
        self._total = 0
        self._look_again_s = 0.0

    def step(self) -> None:
        """One operation. Reads the processor time, a slow system call, only when some wall time has passed."""
        now_s = time.monotonic()
        if now_s > self._look_again_s:
            self._look_again_s = now_s + _LOOK_EVERY_S
            if time.thread_time() - _COLLECTIONS.seconds > self._end_s:
                raise TooMuch(f"it takes more than {self._limit_s:.1f} s of processor time")

    def expect(self, length: int) -> None:
        """Refuse a value of this length before it is made."""
        if length > self._max_value:
            raise TooMuch(f"it makes a value of {length} characters, more than {self._max_value}")

    def expect_items(self, items: object) -> None:
        """Refuse to split a string into too many characters, each of which becomes an object."""
        if isinstance(items, str):
            self.expect(_ITEM_LEN * len(items))

    def admit(self, value: _Value) -> _Value:
        """Count a value that the template made. Raises `TooMuch`."""
        self.step()
        weight = self.weigh(value)
        self.expect(weight)
        self._total += weight
        if self._total > self._max_total:
            raise TooMuch(f"all that it makes is more than {self._max_total} characters long")
        return value

    def weigh(self, value: object) -> int:
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int) and value.bit_length() > _INT_BITS:
            raise TooMuch(f"it makes a number of more than {_INT_BITS} bits")
        if not isinstance(value, dict | list | tuple) and type(value) not in _DICT_VIEWS:
            return _ITEM_LEN
        known = self._weights.get(id(value))
        if known is None:
            assert isinstance(value, Iterable)
            known = self._weights[id(value)] = (value, self._weigh_items(value))
        return known[1]

    def _weigh_items(self, container: Iterable[object]) -> int:
        weight = 0
        for item in container:
            weight += _ITEM_LEN + self.weigh(item)
        if isinstance(container, dict):
            for item in container.values():
                weight += _ITEM_LEN + self.weigh(item)
        return weight

    def settle(self, items: Iterable[_Value]) -> Iterable[_Value]:
        """An iterator as a list, counted while it runs; anything else as it is."""
        if not isinstance(items, Iterator):
            return items
        settled: list[_Value] = []
        for item in items:
            self.expect(_ITEM_LEN * len(settled))
            self.step()
            settled.append(item)
        return settled
