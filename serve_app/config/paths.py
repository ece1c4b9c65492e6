"""Resolves the relative paths of config.yaml against the project root, whatever the working directory.

Serve starts replicas in its own folders, so the working directory is not usable. The root is `ROUNDHOUSE_ROOT` if set
(for an installed package), else the checkout that contains this package.
"""

import os
from pathlib import Path

from serve_app.base.errors import ConfigRefused


def project_root() -> Path | None:
    """The project root; None when the package is installed and `ROUNDHOUSE_ROOT` is unset."""
    named = os.environ.get("ROUNDHOUSE_ROOT")  # noqa: TID251 - a property of the machine, needed to read a config at all
    if named:
        return Path(named).expanduser()
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "pyproject.toml").is_file() else None


def resolve_source(source: str) -> str:
    """The folder or `.gguf` file of a model, absolute; a hub id as it is.

    What starts with "/", "." or "~", or ends with ".gguf", is a path. Raises `ConfigRefused` for a relative one
    without a project root.
    """
    return resolve_path(source) if source.startswith(("/", ".", "~")) or source.endswith(".gguf") else source


def resolve_path(path: str) -> str:
    """A path, made absolute; a URL unchanged. Raises `ConfigRefused` for a relative path without a project root, and
    for an unknown home folder.
    """
    if "://" in path:
        return path
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigRefused(f"The path {path!r} starts with a home folder that does not exist.") from exc
    if expanded.is_absolute():
        return str(expanded)
    root = project_root()
    if root is None:
        raise ConfigRefused(
            f"The path {path!r} is relative, and this is not a checkout: set ROUNDHOUSE_ROOT or use an absolute path."
        )
    return str(root / expanded)
