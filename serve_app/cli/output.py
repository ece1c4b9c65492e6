"""Prints lines to the terminal without buffering."""

import sys


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
