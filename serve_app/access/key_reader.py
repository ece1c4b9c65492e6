"""Reads the keys of a configuration from environment variables and files. A key that cannot be read is left out."""

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from serve_app.access.auth import Keyring
from serve_app.base.errors import ConfigRefused
from serve_app.config.checking.refusal import Refusal
from serve_app.config.keys import KeyConfig, key_digest
from serve_app.config.service import LimitsConfig

_FILE_TIMEOUT_S = 5.0


class KeyReader:
    """`close` it."""

    def __init__(
        self, more_variables: Mapping[str, str] = MappingProxyType({}), *, file_timeout_s: float = _FILE_TIMEOUT_S
    ) -> None:
        """`more_variables`: variables that the ingress has and this process lacks. `file_timeout_s`: the longest wait
        for a key file, so that a file system that hangs delays no other key.
        """
        self._more_variables = more_variables
        self._file_timeout_s = file_timeout_s
        self._files = ThreadPoolExecutor(8, thread_name_prefix="key-file")

    async def read(self, keys: Iterable[KeyConfig], limits: LimitsConfig) -> tuple[Keyring, list[Refusal]]:
        """The keys that can be read, and why the others cannot. Of two equal ones the first is taken."""
        chosen = list(keys)
        digests = await asyncio.gather(*map(self._digest, chosen))
        read: dict[bytes, KeyConfig] = {}
        refusals = (
            [] if chosen else [Refusal("keys", "keys must not be empty: without a key every request is refused.")]
        )
        for key, digest in zip(chosen, digests, strict=True):
            if isinstance(digest, str):
                refusals.append(Refusal("keys", digest))
            elif digest in read:
                refusals.append(
                    Refusal("keys", f"The keys {read[digest].name!r} and {key.name!r} have the same value.")
                )
            else:
                read[digest] = key
        return Keyring(read, limits), refusals

    def close(self) -> None:
        self._files.shutdown(wait=False, cancel_futures=True)

    async def _digest(self, key: KeyConfig) -> bytes | str:
        """The digest, or why there is none."""
        try:
            if key.file is None:
                return key_digest(key, self._more_variables)
            reading = asyncio.get_running_loop().run_in_executor(self._files, key_digest, key)
            return await asyncio.wait_for(reading, self._file_timeout_s)
        except ConfigRefused as exc:
            return str(exc)
        except TimeoutError:
            return f"The key {key.name!r} was not read from the file {key.file!r} within {self._file_timeout_s:g} s."
