"""A process that cannot end itself any more is ended; one that is well, or ends by itself, is left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve_app.cli.processes import descendants
from tests.support.processes.demo_modules import ROOT
from tests.support.waiting import eventually

WATCHED = """
import asyncio, sys, time
from serve_app.base.watchdog import Watchdog

async def main():
    watchdog = Watchdog(2.0)
    print(watchdog._child.pid, flush=True)
    what = await asyncio.to_thread(sys.stdin.readline)
    if what.strip() == "hang":
        time.sleep(60)
    if what.strip() == "close":
        await watchdog.close()
        time.sleep(4)

asyncio.run(main())
"""


def watched() -> tuple[subprocess.Popen[str], int]:
    """A process with a watchdog of 2 s, and the watchdog's pid."""
    command = [sys.executable, "-c", WATCHED]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def tell(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_process_that_is_stopped_is_killed():
    process, child = watched()
    time_stopped = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(30) == -signal.SIGKILL
    assert time.monotonic() - time_stopped > 1
    eventually(lambda: is_gone(child))


@pytest.mark.slow
def test_a_process_whose_event_loop_hangs_is_killed():
    process, child = watched()
    tell(process, "hang")
    assert process.wait(30) == -signal.SIGKILL
    eventually(lambda: is_gone(child))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["end", "close"])
def test_a_process_that_is_done_ends_as_it_likes_and_its_watchdog_with_it(what):
    process, child = watched()
    tell(process, what)
    assert process.wait(30) == 0
    eventually(lambda: is_gone(child))


@pytest.mark.slow
def test_a_watchdog_that_was_paused_with_its_process_kills_nobody():
    process, child = watched()
    for pid in (process.pid, child):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # the pause: twice what is allowed
    for pid in (child, process.pid):
        os.kill(pid, signal.SIGCONT)
    tell(process, "end")
    assert process.wait(30) == 0
    assert child not in descendants()
