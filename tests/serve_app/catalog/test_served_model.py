"""A model's tokenizer and template are data: no code that comes with the model is run."""

import ast
import io
from pathlib import Path

import pytest

from serve_app.base.errors import ConfigRefused
from serve_app.catalog.served_model import load_model
from serve_app.config.catalog_entry import ModelConfig
from tests.support.files.hostile_model import AUTO_MAP, CODE, Trap
from tests.support.files.tiny_gguf import write_gguf
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.readme_blocks import ROOT


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """A model's folder; transformers asks a terminal whether to run code, and this one says yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    return Trap(save_model_folder(tmp_path))


def entry(folder: Path) -> ModelConfig:
    return ModelConfig(id="m", app="m", source=str(folder))


@pytest.mark.parametrize("model_type", ["qwen3", "evil"])
def test_a_tokenizer_beside_a_model_of_its_own_code_is_loaded_as_data(
    trap: Trap, tmp_path: Path, model_type: str
) -> None:
    trap.edit("config.json", model_type=model_type, auto_map=AUTO_MAP)
    assert load_model(entry(tmp_path)).tokenizer.is_fast
    assert not trap.sprung


def test_where_transformers_has_the_tokenizer_the_model_s_code_for_it_is_left_aside(trap: Trap, tmp_path: Path) -> None:
    trap.edit("tokenizer_config.json", auto_map=AUTO_MAP)
    assert load_model(entry(tmp_path)).tokenizer.is_fast
    assert not trap.sprung


@pytest.mark.parametrize("auto_map", [AUTO_MAP, [CODE, CODE], {"AutoTokenizer": [f"other/repository--{CODE}", None]}])
def test_a_tokenizer_of_the_model_s_own_code_is_refused(trap: Trap, tmp_path: Path, auto_map: object) -> None:
    trap.edit("config.json", model_type="evil", auto_map=AUTO_MAP)
    trap.edit("tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    with pytest.raises(ConfigRefused) as error:
        load_model(entry(tmp_path))
    assert str(error.value) == (
        "The tokenizer of the model 'm' needs Python code that comes with the model (auto_map in "
        f"tokenizer_config.json of {str(tmp_path)!r}). No such code is run for a tokenizer: give it a tokenizer.json "
        "and remove auto_map."
    )
    assert not trap.sprung


LOADERS = {"from_pretrained", "from_config"}


def loads_of(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in LOADERS]


def test_every_place_that_loads_what_comes_with_a_model_says_whether_its_code_may_run() -> None:
    files = [path for package in ("serve_app", "engines", "renderers") for path in (ROOT / package).rglob("*.py")]
    loads = {(path, call.lineno): call for path in files for call in loads_of(path)}
    assert len(loads) >= 8, "the search finds them"
    # Without the argument transformers asks on the terminal. `None`: `**options`, which the loaders' tests cover.
    silent = [
        place for place, call in loads.items() if not {k.arg for k in call.keywords} & {"trust_remote_code", None}
    ]
    assert silent == []


def test_files_beside_a_gguf_file_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    write_gguf(tmp_path / "tiny.gguf")
    trap = Trap(tmp_path)
    trap.edit("config.json", model_type="evil", auto_map=AUTO_MAP)
    assert load_model(gguf_entry(tmp_path)).tokenizer.is_fast
    trap.edit("tokenizer_config.json", tokenizer_class="Evil", auto_map=AUTO_MAP)
    with pytest.raises(ConfigRefused, match="needs Python code that comes with the model"):
        load_model(gguf_entry(tmp_path))
    assert not trap.sprung


def gguf_entry(folder: Path) -> ModelConfig:
    return ModelConfig(id="m", app="m", source=str(folder / "tiny.gguf"), context_length=64)
