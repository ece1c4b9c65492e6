"""`python -m serve_app check` finds what a start would find, without starting anything."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.interface.errors import ModelRefused
from engines.model.loader import load_model
from serve_app.cli.commands import main
from tests.support.engines.engine_harness import engine_config, model_folder
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.processes.demo_config import text_config

ROOT = Path(__file__).parents[3]
MODEL = "tiny/Model"


class Files:
    """A config.yaml with a model of a few kilobytes, as it can be started."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.yaml"
        self.model = folder / "model"
        self.roots = folder / "checkpoints"
        self.roots.mkdir()
        save_model_folder(self.model, context_length=512)
        for file in model_folder("llama").iterdir():
            (self.model / file.name).write_bytes(file.read_bytes())
        self.raw: dict[str, Any] = text_config()
        self.served.update(id=MODEL, app="tiny", source=str(self.model))
        del self.served["renderer"]
        self.user_config["checkpoints"]["roots"] = [str(self.roots)]
        self.raw["applications"][1].update(name="tiny", args={"id": MODEL, "source": str(self.model)})

    @property
    def user_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.raw["applications"][0]["deployments"][0]["user_config"]
        return config

    @property
    def served(self) -> dict[str, Any]:
        (model,) = self.user_config["models"]
        return model

    @property
    def args(self) -> dict[str, Any]:
        args: dict[str, Any] = self.raw["applications"][1]["args"]
        return args

    def check(self) -> int:
        self.path.write_text(yaml.safe_dump(self.raw))
        return main(["check", "--config", str(self.path)])


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def complaints(files: Files, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert files.check() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_what_can_be_started_is_in_order(files, capsys):
    assert files.check() == 0
    assert capsys.readouterr().out == f"{files.path} is valid: {MODEL}.\n"


def test_packages_of_tracing_that_are_missing_are_named(files, capsys, monkeypatch):
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    files.raw["applications"][0]["args"]["tracing"] = {"endpoint": "http://127.0.0.1:4318/v1/traces"}
    assert complaints(files, capsys) == [f"tracing needs {missing}, which is not installed: pip install '.[tracing]'."]


def test_a_key_that_serve_would_ignore_is_found(files, capsys):
    files.raw["http_optins"] = files.raw.pop("http_options")
    files.raw["zzz"] = 1
    first, second = complaints(files, capsys)
    assert first == "http_optins is not a key of Serve. Did you mean 'http_options'?"
    assert second.startswith("zzz is not a key of Serve. It has proxy_location, ")


def test_what_serve_refuses_is_said_in_a_sentence(files, capsys):
    files.raw["proxy_location"] = "Nowhere"
    (sentence,) = complaints(files, capsys)
    assert sentence.startswith("proxy_location must be ")


def test_what_serve_says_of_the_applications_together_is_a_sentence_at_its_place(files, capsys):
    files.raw["applications"].append(files.raw["applications"][1])
    (sentence,) = complaints(files, capsys)
    assert sentence == ('applications: Found multiple configs for application "tiny". Please remove all duplicates.')


def test_an_option_of_a_deployment_that_serve_refuses_is_named(files, capsys):
    files.raw["applications"][0]["deployments"][0]["max_ongoing_requests"] = -1
    (sentence,) = complaints(files, capsys)
    assert sentence == "applications[0].deployments[0].max_ongoing_requests must be greater than 0, got -1."


def test_a_missing_model_folder_is_found(files, capsys):
    for where in (files.served, files.args):
        where["source"] = "/nowhere/model"
    assert complaints(files, capsys) == [
        "applications (tiny): The source does not exist: '/nowhere/model'.",
        f"The source of the model '{MODEL}' does not exist: '/nowhere/model'.",
    ]


def test_a_context_longer_than_the_model_is_found(files, capsys):
    files.served["variants"] = {"long": 1024}
    files.args["context_length"] = 600
    files.served["context_length"] = 512
    said = complaints(files, capsys)
    assert said == [
        f"models: the context_length of '{MODEL}:long' must be at most that of its application 'tiny', 600, got 1024."
    ]
    del files.served["variants"]
    source = str(files.model)
    assert complaints(files, capsys) == [
        f"applications (tiny): context_length = 600 is more than the 512 tokens that '{source}' was made for."
    ]
    del files.args["context_length"]
    files.served["variants"] = {"long": 1024}
    most = f"must be at most 512, the max_position_embeddings of '{source}', got 1024"
    assert complaints(files, capsys) == [f"The context_length of '{MODEL}:long' {most}."]


def test_a_missing_checkpoint_root_is_found(files, capsys):
    file = files.roots / "file"
    file.touch()
    files.user_config["checkpoints"]["roots"] = [str(files.roots), f"{files.roots}/none", f"file://{file}"]
    assert complaints(files, capsys) == [
        f"checkpoints.roots[1] must be a folder that exists, got '{files.roots}/none'.",
        f"checkpoints.roots[2] must be a folder that exists, got 'file://{file}'.",
    ]


def test_a_store_of_checkpoints_that_cannot_be_opened_is_found(files, capsys):
    files.user_config["checkpoints"]["roots"] = ["nosuch://bucket"]
    (sentence,) = complaints(files, capsys)
    assert sentence.startswith("The root 'nosuch://bucket' ")


def test_no_keys_are_found(files, capsys):
    files.user_config["keys"] = []
    assert complaints(files, capsys) == ["keys must not be empty: without a key every request is refused."]


def test_keys_that_cannot_be_read_are_found_all_at_once(files, capsys, monkeypatch):
    monkeypatch.delenv("TEST_API_KEY", raising=False)
    files.user_config["keys"] = [{"name": "ci", "env": "TEST_API_KEY"}, {"name": "file", "file": "/nowhere/key"}]
    assert complaints(files, capsys) == [
        "The key 'ci' is empty in the environment variable 'TEST_API_KEY'.",
        "The key 'file' cannot be read from the file '/nowhere/key'.",
    ]


def test_a_key_may_be_read_from_a_variable_that_the_file_gives_to_the_api(files, capsys, monkeypatch):
    monkeypatch.delenv("TEST_API_KEY", raising=False)
    files.user_config["keys"] = [{"name": "ci", "env": "TEST_API_KEY"}]
    files.raw["applications"][0]["runtime_env"] = {"env_vars": {"TEST_API_KEY": "secret"}}
    least = "must have at least 16 characters, got 6"
    assert complaints(files, capsys) == [f"The key 'ci' in the environment variable 'TEST_API_KEY' {least}."]
    files.raw["applications"][0]["runtime_env"] = {"env_vars": {"TEST_API_KEY": "secret-of-a-length"}}
    assert files.check() == 0


def test_a_renderer_that_is_not_there_is_found(files, capsys):
    files.served["renderer"] = "gpt9"
    (sentence,) = complaints(files, capsys)
    assert sentence.startswith(f"The model '{MODEL}' cannot have the renderer 'gpt9': renderer must be one of ")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["full_attention"]}, "(3) must be equal to the number of `layer_types` (1)"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"max_position_embeddings": 0}, "names no context length"),
    ],
)
def test_a_model_that_the_engine_does_not_know_is_found(files, capsys, config, words):
    path = files.model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    files.served["context_length"] = 512
    sentence = " ".join(complaints(files, capsys))
    assert "applications (tiny): " in sentence
    assert words in sentence


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_that_is_no_json_is_found_without_a_traceback(files, capsys, file):
    (files.model / file).write_text("{")
    assert all("cannot be loaded" in sentence for sentence in complaints(files, capsys))


def test_weights_that_are_missing_are_found(files, capsys):
    weights = files.model / "model.safetensors"
    index = files.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": weights.name, "b": "model-00002.safetensors"}}))
    assert complaints(files, capsys) == [
        f"applications (tiny): The folder '{files.model}' lacks model-00002.safetensors, which {index.name} names."
    ]
    index.unlink()
    weights.unlink()
    assert complaints(files, capsys) == [
        f"applications (tiny): The folder '{files.model}' holds no weights, such as model.safetensors."
    ]


def test_weights_that_are_cut_off_are_found(files, capsys):
    weights = files.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (sentence,) = complaints(files, capsys)
    assert sentence.startswith(f"applications (tiny): The weights '{weights}' cannot be read: ")
    with pytest.raises(ModelRefused, match="cannot be loaded"):
        load_model(engine_config(source=str(files.model)))


def test_what_check_finds_in_a_model_a_start_finds_too(files):
    (files.model / "model.safetensors").unlink()
    with pytest.raises(ModelRefused):
        load_model(engine_config(source=str(files.model)))


def test_a_model_without_an_engine_needs_no_weights(files):
    (files.model / "model.safetensors").unlink()
    files.args.update(engine="fake", source="nowhere")
    assert files.check() == 0


def with_slug(files: Files, **upstream: Any) -> None:
    price = {"prompt": 1, "completion": 1}
    far = {"url": "https://api.example.com/v1", "model": "theirs", **upstream}
    endpoints = [{"name": "here", "model": MODEL, "price": price}, {"name": "far", "upstream": far, "price": price}]
    files.user_config["marketplace"] = {"slugs": [{"id": "acme/two", "endpoints": endpoints}]}


def test_slugs_are_named_after_the_models(files, capsys):
    with_slug(files)
    assert files.check() == 0
    assert capsys.readouterr().out == f"{files.path} is valid: {MODEL}, acme/two.\n"


def test_the_key_of_an_upstream_that_cannot_be_read_is_found(files, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with_slug(files, key={"env": "NO_SUCH_KEY"})
    assert complaints(files, capsys) == [
        "The key of the endpoint 'acme/two/ep/far' is empty in the environment variable 'NO_SUCH_KEY'."
    ]
    files.raw["applications"][0]["runtime_env"] = {"env_vars": {"NO_SUCH_KEY": "sk-it-is-there-for-the-api"}}
    assert files.check() == 0


def test_a_slug_that_is_wrong_is_found_at_its_place(files, capsys):
    with_slug(files, url="http://127.0.0.1/v1")
    (complaint,) = complaints(files, capsys)
    assert complaint.startswith(
        "applications[0] (api): marketplace.slugs[0].endpoints[1].upstream.url must be at a public"
    )


def test_slugs_may_be_all_there_is(files, capsys):
    with_slug(files)
    del files.user_config["models"]
    del files.user_config["marketplace"]["slugs"][0]["endpoints"][0]
    del files.raw["applications"][1:]
    assert files.check() == 0
    assert capsys.readouterr().out == f"{files.path} is valid: acme/two.\n"


def test_up_checks_in_another_process_and_keeps_nothing_of_what_that_imported(files: Files) -> None:
    files.path.write_text(yaml.safe_dump(files.raw))
    program = f"""
import sys
from pathlib import Path
from serve_app.cli.check import check_in_child
print(check_in_child(Path({str(files.path)!r})).model_ids)
print({{"torch", "transformers", "ray", "numpy"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == f"{[MODEL]}\nset()\n"


def test_up_refuses_in_the_words_of_check(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.user_config["checkpoints"]["roots"] = ["/nowhere", "/nor/here"]
    said = complaints(files, capsys)
    assert len(said) == 2
    assert main(["up", "--config", str(files.path)]) == 2
    assert capsys.readouterr().err.splitlines() == said
