"""Keys are read each on its own."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from serve_app.access.auth import hash_key
from serve_app.access.key_reader import KeyReader
from serve_app.config.keys import KeyConfig
from serve_app.config.service import LimitsConfig

GOOD = KeyConfig(name="good", sha256=hash_key("x").hex())


def read(*keys: KeyConfig, **settings: Any) -> tuple[int, list[str]]:
    """How many were read, and what is said of the others."""
    reader = KeyReader(**settings)
    keyring, refusals = asyncio.run(reader.read(keys, LimitsConfig()))
    reader.close()
    return len(keyring), [refusal.sentence for refusal in refusals]


def test_a_key_that_cannot_be_read_keeps_out_no_other(tmp_path: Path) -> None:
    missing = KeyConfig(name="missing", file=str(tmp_path / "none"))
    sentence = f"The key 'missing' cannot be read from the file '{tmp_path / 'none'}'."
    assert read(missing, GOOD) == (1, [sentence])


def test_a_file_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    sentence = f"The key 'hangs' was not read from the file '{pipe}' within 0.05 s."
    try:
        assert read(KeyConfig(name="hangs", file=str(pipe)), GOOD, file_timeout_s=0.05) == (1, [sentence])
    finally:
        with pipe.open("wb"):  # its reader may go
            pass


def test_of_two_equal_keys_the_first_is_taken() -> None:
    same = KeyConfig(name="same", sha256=GOOD.sha256)
    assert read(GOOD, same) == (1, ["The keys 'good' and 'same' have the same value."])


def test_without_a_key_it_is_said_that_nobody_can_call() -> None:
    assert read() == (0, ["keys must not be empty: without a key every request is refused."])


def test_a_key_may_be_read_from_a_variable_that_only_the_ingress_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_API_KEY", raising=False)
    key = KeyConfig(name="ci", env="TEST_API_KEY")
    assert read(key, more_variables={"TEST_API_KEY": "x" * 16}) == (1, [])
    assert read(key) == (0, ["The key 'ci' is empty in the environment variable 'TEST_API_KEY'."])
