"""The engines of a test module."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.engines.engine_harness import Engines


@pytest.fixture(scope="module")
def engines() -> "Iterator[Engines]":
    # Imported here: it loads torch, which the tests of planning do not need.
    from tests.support.engines.engine_harness import Engines

    with Engines() as engines:
        yield engines
