"""The API key that a command sends. `ps` shows an argument, but not a variable or a file."""

import os
from pathlib import Path

from serve_app.base.errors import ConfigRefused
from serve_app.config.keys import DEMO_KEY

VARIABLE = "ROUNDHOUSE_API_KEY"


def read_api_key(argument: str | None, file: Path | None) -> str:
    """The argument, else the file's only line, else the variable, else the demo's key. Raises `ConfigRefused`."""
    if argument is not None:
        return _checked(argument, "The value of --key")
    if file is not None:
        try:
            return _checked(file.read_text(encoding="utf-8"), f"The key file {str(file)!r}")
        except OSError as exc:
            raise ConfigRefused(f"The key file {str(file)!r} cannot be read: {exc.strerror}.") from exc
        except UnicodeDecodeError as exc:
            raise ConfigRefused(f"The key file {str(file)!r} is not UTF-8.") from exc
    given = os.environ.get(VARIABLE)  # noqa: TID251 - of the user's terminal, not of the service
    return DEMO_KEY if given is None else _checked(given, f"The environment variable {VARIABLE}")


def _checked(text: str, where: str) -> str:
    key = text.strip()
    if not key:
        raise ConfigRefused(f"{where} is empty.")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigRefused(f"{where} must be one key of printable ASCII characters without a space.")
    return key
