"""How soon a waiting thread gets the interpreter lock."""

import sys

SWITCH_INTERVAL_S = 5e-5
"""Python's own is 5 ms. A thread that does what gives the interpreter up, a call of torch or a write to a socket, waits
for so long each time while another thread runs Python: a step of an engine with its dozens to hundreds of calls took 50
to 600 times as long beside one.
"""


def switch_soon() -> None:
    """Applies to the whole process, from now on."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
