"""Kills this process when its event loop has not run for too long.

A process that is stopped, or whose interpreter hangs, cannot end itself, and Ray's own kill waits for its answer. So a
small child process watches a pipe to which the event loop writes every second.
"""

import asyncio
import logging
import os
import subprocess
import sys
from contextlib import suppress

logger = logging.getLogger(__name__)

_BEAT_S = 1.0

# Seconds without a byte are counted one by one: a pause of the whole machine adds only one.
_CHILD = """
import os, select, signal, sys
pipe, parent, limit = map(int, sys.argv[1:])
silent = 0
while silent < limit:
    if not select.select([pipe], [], [], 1.0)[0]:
        silent += 1
    elif os.read(pipe, 4096):
        silent = 0
    else:
        sys.exit()
if os.getppid() == parent:
    os.kill(parent, signal.SIGKILL)
"""


class Watchdog:
    """Watches the running event loop from its start until `close`."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: longest time without a byte, rounded to whole seconds, at least 2."""
        read_end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        arguments = (str(read_end), str(os.getpid()), str(max(2, round(limit_s))))
        command = [sys.executable, "-I", "-S", "-c", _CHILD, *arguments]
        self._child = subprocess.Popen(command, pass_fds=(read_end,), stdin=subprocess.DEVNULL)
        os.close(read_end)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def close(self) -> None:
        """Close the pipe, which ends the child."""
        self._beating.cancel()
        with suppress(asyncio.CancelledError):
            await self._beating
        os.close(self._pipe)
        await asyncio.to_thread(self._child.wait)

    async def _beat(self) -> None:
        while True:
            with suppress(BlockingIOError):  # the child has not read for long: it lags, and knows that we are there
                try:
                    os.write(self._pipe, b".")
                except BrokenPipeError:
                    logger.error("The watchdog process has ended: only Serve can now detect that this process hangs.")
                    return
            await asyncio.sleep(_BEAT_S)
