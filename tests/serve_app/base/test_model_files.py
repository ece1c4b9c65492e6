"""The JSON files of a base model."""

from pathlib import Path

import pytest

from serve_app.base.errors import ConfigRefused
from serve_app.base.model_files import read_json


def test_a_file_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert read_json(str(tmp_path), "config.json", None) == {"vocab_size": 7}


@pytest.mark.parametrize("content", [None, "[]", "7"])
def test_a_file_that_is_missing_or_no_object_says_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert read_json(str(tmp_path), "config.json", None) == {}


def test_a_gguf_file_has_no_other_files() -> None:
    assert read_json("/nowhere/model.gguf", "config.json", None) == {}


def test_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigRefused, match=r"^The model '/nowhere' cannot be found\.$"):
        read_json("/nowhere", "config.json", None)


@pytest.mark.parametrize("content", [b'{"a": ', b"\xff"])
def test_a_file_that_is_not_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ConfigRefused, match=r"^The file 'generation_config.json' of the model '.*' is not JSON: .*\.$"):
        read_json(str(tmp_path), "generation_config.json", None)
