"""How soon a waiting thread gets the interpreter lock."""

import sys

SWITCH_INTERVAL_S = 5e-5
"""Python's own is 5 ms. Calls of torch and writes to sockets release the lock. While another thread runs Python, a
caller then waits this long each time. A step of an engine has dozens to hundreds of such calls, and took 50 to 600
times as long.
"""


def switch_soon() -> None:
    """Applies to the whole process, from now on."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
