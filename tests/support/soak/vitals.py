"""What a service holds: memory, open files, threads; and what its metrics say is under way."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

_UNDER_WAY = (
    "requests_running",
    "engine_running",
    "engine_waiting",
    "engine_queued_tokens",
    "engine_adapters_pinned",
    "engine_adapters_loading",
)
_BLOCKS, _FREE = "engine_blocks", "engine_blocks_free"


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of all processes of a service together. `memory_bytes`: pages that several share count once."""

    processes: int
    memory_bytes: int
    open_files: int
    threads: int


def below(pid: int) -> list[psutil.Process]:
    """All descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def vitals(processes: Iterable[psutil.Process]) -> Vitals:
    """Those that have ended meanwhile do not count."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append((process.memory_full_info().pss, process.num_fds(), process.num_threads()))
    memory, files, threads = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0, 0)
    return Vitals(len(found), memory, files, threads)


def under_way(metrics: str) -> dict[str, float]:
    """What is not zero, though no request is under way: by metric, without the prefix `ray_roundhouse_`."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in metrics.splitlines():
        if line.startswith("ray_roundhouse_"):
            name, _, value = line.removeprefix("ray_roundhouse_").rpartition(" ")
            sums[name.partition("{")[0]] += float(value)
    found = {name: sums[name] for name in _UNDER_WAY if sums[name]}
    used = sums[_BLOCKS] - sums[_FREE]
    return {**found, "engine blocks in use": used} if used else found
