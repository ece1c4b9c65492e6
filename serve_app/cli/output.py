"""Lines for whoever sits at the terminal, written when they are said."""

import sys


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
