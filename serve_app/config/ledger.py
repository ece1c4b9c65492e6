"""The ledger of usage in the configuration: its database, and the folder for records that wait for it."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Self

from annotated_types import Ge, Le
from pydantic import model_validator
from typing_extensions import Doc

from serve_app.base.errors import ConfigRefused
from serve_app.base.explain import Complaint
from serve_app.config.checking.section import Section, Text
from serve_app.config.keys import VariableName
from serve_app.config.paths import resolve_path

_DEFAULT_DIRECTORY: Final = ".local/share/roundhouse/ledger"
_DATABASE_FILE: Final = "ledger.sqlite"
_SQLITE: Final = "sqlite:///"


class LedgerConfig(Section):
    """Where one record of usage per request is kept."""

    url: Annotated[
        Text | None,
        Doc(
            "`sqlite:///` and a path, or `postgresql://user@host/database`; null: a SQLite file in `directory`. "
            "A password belongs into `url_env` or libpq's password file."
        ),
    ] = None
    url_env: Annotated[
        VariableName | None, Doc("Environment variable of the ingress that holds the URL, instead of `url`.")
    ] = None
    directory: Annotated[
        Text | None,
        Doc(
            "Local folder for records that wait for the database, and for the SQLite file. "
            "null: `~/.local/share/roundhouse/ledger`."
        ),
    ] = None
    spool_bytes: Annotated[
        int,
        Ge(1 << 16),
        Doc("Most bytes of records that one ingress keeps while the database is away; more are dropped and counted."),
    ] = 256 * 2**20
    write_interval_s: Annotated[float, Ge(0.01), Le(3600), Doc("How often waiting records are written.")] = 1.0

    @model_validator(mode="after")
    def _one_url(self) -> Self:
        given = [name for name in ("url", "url_env") if getattr(self, name) is not None]
        if len(given) > 1:
            raise Complaint("must have at most one of url and url_env", given)
        return self

    @property
    def folder(self) -> Path:
        """Raises `ConfigRefused` for a relative path without a project root."""
        return Path.home() / _DEFAULT_DIRECTORY if self.directory is None else Path(resolve_path(self.directory))

    def database_url(self, more_variables: Mapping[str, str] = MappingProxyType({})) -> str:
        """The URL, with its password. `more_variables`: variables that the ingress has and this process lacks. Raises
        `ConfigRefused`.
        """
        if self.url is None and self.url_env is None:
            return f"{_SQLITE}{self.folder / _DATABASE_FILE}"
        if self.url_env is None:
            assert self.url is not None
            return _resolved(self.url)
        variables = {**os.environ, **more_variables}  # noqa: TID251 - where the rule sends all to
        url = variables.get(self.url_env, "").strip()
        if not url:
            raise ConfigRefused(f"ledger.url_env: the environment variable {self.url_env!r} is empty.")
        return _resolved(url)


def _resolved(url: str) -> str:
    """A relative path of a SQLite file starts at the project root, as all paths of config.yaml do."""
    path = url.removeprefix(_SQLITE)
    return url if path in (url, "") else _SQLITE + resolve_path(path)
