"""How many cores this process may keep busy."""

import math
import os
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """The cores that this process may run on, but no more than its control group's share of time. More threads would
    use that share up early in each period, and then all of them would stop until the next one.
    """
    cores = len(os.sched_getaffinity(0))
    share = _cgroup_share(root / "sys/fs/cgroup")
    return cores if share is None else max(1, min(cores, math.ceil(share)))


def _cgroup_share(folder: Path) -> float | None:
    """CPU time per period, in cores; None without a limit. Reads version 2 of control groups first, then version 1."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
