"""The fixtures of tests that need a database; a module takes them with `pytest_plugins`."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ledger.postgres import Postgres, postgres_fixture


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    yield from postgres_fixture()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.new_database(uuid.uuid4().hex)
