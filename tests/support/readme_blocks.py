"""The fenced blocks of the README, so that tests can run them.

The word after the language says what a block needs: ```` ```python service ```` runs against a running service. The
address that the blocks name is replaced by the one that a test listens on.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:8000"
_FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """`line` is where its text begins in the file, from 1."""

    language: str
    tag: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.language}-{self.tag}-line-{self.line}"


def blocks(tag: str | None = None, *, language: str | None = None, file: Path = ROOT / "README.md") -> list[Block]:
    """In the order of the page."""
    text = file.read_text(encoding="utf-8")
    found = [Block(m[1], m[2] or "", m[3], text.count("\n", 0, m.start(3)) + 1) for m in _FENCE.finditer(text)]
    return [block for block in found if tag in (None, block.tag) and language in (None, block.language)]


def environment() -> dict[str, str]:
    """This process's, without what a `make VENV=…` that runs the tests hands on to every other `make`."""
    variables = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return {
        name: value
        for name, value in os.environ.items()
        if name not in variables and not name.startswith(("MAKE", "MFLAGS"))
    }


def run(block: Block, address: str, checkout: Path) -> str:
    """Run a python or bash block in a checkout, by the interpreter of its own set-up, against the service at `address`
    (host:port) and return what it printed.

    Raises `subprocess.CalledProcessError` with its output when it fails.
    """
    text = block.text.replace(ADDRESS, address)
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python), "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
