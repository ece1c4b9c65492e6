"""How many cores this process may keep busy."""

import math
import os
from pathlib import Path


def available_cores(root: Path = Path("/")) -> int:
    """Those that it may run on, but no more than its control group's share of time: more threads would use that up in
    a moment and then all stand still until the next period.
    """
    cores = len(os.sched_getaffinity(0))
    share = _cgroup_share(root / "sys/fs/cgroup")
    return cores if share is None else max(1, min(cores, math.ceil(share)))


def _cgroup_share(folder: Path) -> float | None:
    """Cores' worth of time per period; None without a limit. Version 2 of control groups first, then version 1."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
