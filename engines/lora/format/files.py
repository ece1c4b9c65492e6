"""Reading an adapter's two files whole, without trusting what lies there."""

import os
import stat

from engines.interface.errors import AdapterChanged, AdapterRefused, AdapterUnavailable
from engines.lora.format.digest import CONFIG_FILE, MAX_CONFIG_BYTES, PICKLE_FILE, WEIGHTS_FILE


def read_files(directory: str, max_weights_bytes: int) -> tuple[bytearray, bytearray]:
    """Configuration and weights.

    Raises `AdapterChanged` when a file is missing or shrinks while it is read. Raises `AdapterUnavailable` when a file
    cannot be read, and `AdapterRefused` when it is not a regular file or is too large.
    """
    config = _read(directory, CONFIG_FILE, MAX_CONFIG_BYTES)
    weights = _read(directory, WEIGHTS_FILE, max_weights_bytes)
    if config is None or weights is None:
        if os.path.lexists(os.path.join(directory, PICKLE_FILE)):
            raise AdapterRefused(f"{PICKLE_FILE} is a pickle and is never read; save the adapter as {WEIGHTS_FILE}.")
        raise AdapterChanged("The checkpoint's files no longer exist.")
    return config, weights


def _read(directory: str, name: str, max_bytes: int) -> bytearray | None:
    try:
        file = open(os.path.join(directory, name), "rb", buffering=0, opener=_open)  # noqa: SIM115 - closed below
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as exc:
        raise AdapterRefused(f"{name} is not a regular file.") from exc
    except OSError as exc:
        raise AdapterUnavailable(f"{name} cannot be opened: {exc.strerror}.") from exc
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRefused(f"{name} is not a regular file.")
        if status.st_size > max_bytes:
            raise AdapterRefused(f"{name} has {status.st_size} bytes; the limit is {max_bytes}.")
        content = bytearray(status.st_size)
        view, filled = memoryview(content), 0
        try:
            while filled < len(content):
                count = file.readinto(view[filled:])
                if not count:
                    raise AdapterChanged(f"{name} shrank while it was being read.")
                filled += count
        except OSError as exc:
            raise AdapterUnavailable(f"{name} cannot be read: {exc.strerror}.") from exc
        return content


def _open(path: str, flags: int) -> int:
    """Does not block: opening a FIFO would otherwise wait for a writer for ever."""
    return os.open(path, flags | os.O_NONBLOCK)
