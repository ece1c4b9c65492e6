"""The board: sums up, for each key, what all ingresses use.

It is no place of truth. Each ingress keeps its own account of every key (`limits.py`) and charges it with what it hears
of the others. So a board that is lost takes nothing with it: the next one starts at zero, under another `epoch`, and
gets what happened since.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SILENT_AFTER_S = 3.0
"""After this long without a word of an ingress, its running requests do not count: it has ended, or is cut off."""


@dataclass(frozen=True, slots=True)
class Used:
    """What is used of one key's limits: requests that run now; requests and tokens of its minute, taken in all."""

    running: int = 0
    requests: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Telling:
    """What an ingress tells: `used` by key, of what has changed. `requests` and `tokens` are those since the telling
    before; one with the same `serial` is the same, told again. `epoch` and `version`: of the last hearing.
    """

    ingress: str
    serial: int
    used: Mapping[str, Used]
    epoch: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Hearing:
    """What an ingress hears: the sums over all ingresses, of the keys that changed since its last hearing, or of all
    if that was of another epoch. `running` is without its own. `is_new`: the board did not know the ingress, which must
    tell all that runs again.
    """

    epoch: str
    version: int
    sums: Mapping[str, Used]
    is_new: bool = False


@dataclass(slots=True)
class _Sum:
    running: int = 0
    requests: float = 0.0
    tokens: float = 0.0
    version: int = 0


@dataclass(slots=True)
class _Ingress:
    serial: int = -1
    heard_at: float = 0.0
    running: dict[str, int] = field(default_factory=dict)


class Board:
    """Used by one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoch = secrets.token_hex(8)
        self._version = 0
        self._ingresses: dict[str, _Ingress] = {}
        self._sums: OrderedDict[str, _Sum] = OrderedDict()  # those that changed last come last

    def exchange(self, telling: Telling) -> Hearing:
        now = self._clock()
        is_new = telling.ingress not in self._ingresses
        ingress = self._ingresses.setdefault(telling.ingress, _Ingress())
        ingress.heard_at = now
        self._forget_silent(now)
        if telling.serial != ingress.serial:
            ingress.serial = telling.serial
            for key, used in telling.used.items():
                self._add(key, used, ingress)
        since = telling.version if telling.epoch == self._epoch else 0
        return Hearing(self._epoch, self._version, self._changed(since, ingress), is_new)

    def _add(self, key: str, used: Used, ingress: _Ingress) -> None:
        total = self._touch(key)
        total.running += used.running - ingress.running.pop(key, 0)
        total.requests += used.requests
        total.tokens += used.tokens
        if used.running:
            ingress.running[key] = used.running

    def _touch(self, key: str) -> _Sum:
        self._version += 1
        total = self._sums.setdefault(key, _Sum())
        total.version = self._version
        self._sums.move_to_end(key)
        return total

    def _forget_silent(self, now: float) -> None:
        for name, ingress in list(self._ingresses.items()):
            if now - ingress.heard_at > SILENT_AFTER_S:
                del self._ingresses[name]
                for key, running in ingress.running.items():
                    self._touch(key).running -= running

    def _changed(self, since: int, ingress: _Ingress) -> dict[str, Used]:
        changed = {}
        for key, total in reversed(self._sums.items()):
            if total.version <= since:
                break
            own = ingress.running.get(key, 0)
            changed[key] = Used(total.running - own, total.requests, total.tokens)
        return changed
