"""Cores that a process may use, within its control group."""

import os
from pathlib import Path

import pytest

from engines.host.cores import available_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ALL),
        ({"cpu.max": "max 100000\n"}, ALL),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "100001 100000\n"}, min(ALL, 2)),
        ({"cpu.max": "99900000 100000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_the_control_groups_share_of_time_is_a_limit(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert available_cores(tmp_path) == expected


def test_this_machine_has_some() -> None:
    assert 1 <= available_cores() <= ALL
