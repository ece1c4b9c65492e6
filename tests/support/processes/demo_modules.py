"""The demo's scripts as modules: they are run as files, so nothing installs them."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "cluster"), str(ROOT / "cluster" / "examples")]

import lessons  # noqa: E402
import prepare_demo  # noqa: E402
import train_checkpoint  # noqa: E402

__all__ = ["ROOT", "lessons", "prepare_demo", "train_checkpoint"]
