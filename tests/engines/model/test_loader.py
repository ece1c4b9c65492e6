"""Models from folders and GGUF files."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.model.loader import load_model, pick_device, split_gguf
from tests.support.engines import tiny_models, tiny_vision
from tests.support.engines.engine_harness import (
    DrivenEngine,
    engine_config,
    model_folder,
    prompt_of,
    reference_logits,
    request,
)
from tests.support.files.hostile_model import AUTO_MAP, CODE, Trap
from tests.support.files.tiny_gguf import write_gguf


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_gguf_file_is_served_as_the_model_that_it_holds(attention: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    model = write_gguf(file).eval()
    vocabulary = model.config.vocab_size
    config = engine_config(source=str(file), dtype="float32", attention=attention)
    with DrivenEngine(config) as engine:
        assert engine.engine.facts.vocab_size == vocabulary
        assert engine.engine.facts.context_length == model.config.max_position_embeddings
        made = request([token_id % vocabulary for token_id in prompt_of(30)], max_tokens=12, logprobs=0)
        result = engine.one(made)
    rows = torch.log_softmax(reference_logits(model, (*made.prompt_token_ids, *result.token_ids))[29:-1], dim=-1)
    for row, token_id, score in zip(rows, result.token_ids, result.logprobs, strict=True):
        assert float(row.max() - row[token_id]) < 1e-3
        assert score.logprob == pytest.approx(float(row[token_id]), abs=1e-3)


def test_a_gguf_file_that_is_missing_or_holds_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"nothing\.gguf' cannot be loaded"):
        load_model(engine_config(source=str(tmp_path / "nothing.gguf")))
    (tmp_path / "noise.gguf").write_bytes(bytes(range(256)) * 4)
    with pytest.raises(ModelRefused, match=r"noise\.gguf' cannot be loaded"):
        load_model(engine_config(source=str(tmp_path / "noise.gguf")))


def test_a_source_is_cut_only_when_it_is_a_gguf_file() -> None:
    assert split_gguf("/models/a/tiny.gguf") == ("/models/a", "tiny.gguf")
    assert split_gguf("tiny.gguf") == (".", "tiny.gguf")
    assert split_gguf("owner/name") == ("owner/name", None)


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
)
def test_weights_are_loaded_in_the_dtype_that_is_asked_for_or_stored(asked: str, loaded: torch.dtype) -> None:
    model = load_model(engine_config("llama", dtype=asked))
    assert model.dtype == loaded
    assert {parameter.dtype for parameter in model.model.parameters()} == {loaded}


def test_exact_loads_in_float32_whatever_is_stored(tmp_path: Path) -> None:
    load_model(engine_config("llama", dtype="bfloat16")).model.save_pretrained(tmp_path)
    assert load_model(engine_config(source=str(tmp_path))).dtype == torch.bfloat16
    assert load_model(engine_config(source=str(tmp_path), exact=True)).dtype == torch.float32


def test_a_model_knows_its_vocabulary_and_context() -> None:
    loaded = load_model(engine_config("llama"))
    assert (loaded.vocab_size, loaded.context_length) == (320, 512)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def changed(folder: Path, name: str, shape: tuple[int, ...] | None) -> EngineConfig:
    """The weights of this folder with one tensor of another shape, or without it."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return engine_config(source=str(folder))


MISFITS: dict[str, tuple[str, str, tuple[int, ...], list[int]]] = {
    "of a text model": ("llama", "model.layers.1.self_attn.k_proj.weight", (16, 64), [64, 64]),
    "of a router": ("qwen3-moe", "model.layers.1.mlp.gate.weight", (4, 65), [4, 64]),
    "of a vision tower": ("llava", "vision_tower.encoder.layers.1.mlp.fc1.bias", (49,), [48]),
    "of a vision model's text": ("qwen3-vl", "model.language_model.layers.2.mlp.up_proj.weight", (9, 64), [96, 64]),
    "of a name that the model changes": ("llava", "language_model.model.layers.2.mlp.up_proj.weight", (1,), [96, 64]),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_tensor_of_another_shape_is_refused_with_its_file(kind: str, tmp_path: Path) -> None:
    name, tensor, shape, expected = MISFITS[kind]
    config = changed((tiny_vision if name in tiny_vision.CONFIGS else tiny_models).save(name, tmp_path), tensor, shape)
    with pytest.raises(ModelRefused) as refused:
        load_model(config)
    assert str(refused.value) == (
        f"{str(tmp_path)!r} cannot be loaded: {tensor!r} in model.safetensors has the shape {list(shape)}, its "
        f"configuration asks for {expected}."
    )


def test_an_expert_that_does_not_fit_the_others_is_refused_with_its_file(tmp_path: Path) -> None:
    tensor = "model.layers.1.mlp.experts.2.up_proj.weight"
    config = changed(tiny_models.save("qwen3-moe", tmp_path), tensor, (48, 63))
    refusal = f"'{tensor}' in model.safetensors has the shape [48, 63], that of other experts has [48, 64]"
    with pytest.raises(ModelRefused, match=re.escape(refusal)):
        load_model(config)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("llama", "model.layers.1.self_attn.k_proj.weight"), ("llava", "vision_tower.pre_layrnorm.weight")],
)
def test_a_model_whose_weights_lack_a_tensor_is_refused(name: str, tensor: str, tmp_path: Path) -> None:
    """transformers fills it with random numbers."""
    config = changed((tiny_vision if name in tiny_vision.CONFIGS else tiny_models).save(name, tmp_path), tensor, None)
    with pytest.raises(ModelRefused, match=rf"its weights lack '(model\.)?{re.escape(tensor)}'\.$"):
        load_model(config)


def test_many_tensors_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(
        ModelRefused, match=r"\[64, 96\], its configuration asks for \[64, 128\], and 8 more do not fit"
    ):
        load_model(engine_config(source=str(folder)))


def test_a_model_that_names_no_context_length_is_refused(tmp_path: Path) -> None:
    config = (model_folder("llama") / "config.json").read_text()
    for file in model_folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(
        config.replace('"max_position_embeddings": 512', '"max_position_embeddings": 0')
    )
    with pytest.raises(ModelRefused, match="its configuration names no context length"):
        load_model(engine_config(source=str(tmp_path)))


def test_the_device_is_the_one_that_is_there() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto").type == expected
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_are_served_up_to_where_they_begin_to(kind: str, tmp_path: Path) -> None:
    factors = {"long_factor": [2.0] * 16, "short_factor": [1.0] * 16} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, **factors}
    config = json.loads((model_folder("llama") / "config.json").read_text())
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    refusal = f"llama: rotary positions of type '{kind}' depend on the length of a sequence; set context_length to at"
    with pytest.raises(ModelRefused, match=refusal):
        load_model(engine_config(source=str(tmp_path)))
    prompt = prompt_of(100)
    with DrivenEngine(engine_config(source=str(tmp_path), context_length=128)) as engine:
        asked = [request(prompt, logprobs=0, max_tokens=1), request(prompt[:20], logprobs=0, max_tokens=1)]
        found = engine.generate(*asked)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for made, result in zip(asked, found, strict=True):
        expected = torch.log_softmax(reference_logits(model, made.prompt_token_ids)[-1], dim=-1)
        assert result.logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """A model's folder; transformers asks a terminal whether to run code, and this one says yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    return Trap(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def test_where_transformers_has_the_architecture_the_model_s_code_for_it_is_left_aside(
    trap: Trap, tmp_path: Path
) -> None:
    trap.edit("config.json", auto_map=AUTO_MAP)
    trap.edit("generation_config.json", custom_generate="./")
    load_model(engine_config(source=str(tmp_path / "model")))
    assert not trap.sprung


@pytest.mark.parametrize("auto_map", [AUTO_MAP, {"AutoConfig": f"other/repository--{CODE}"}])
def test_a_model_of_its_own_code_is_refused(trap: Trap, tmp_path: Path, auto_map: object) -> None:
    trap.edit("config.json", model_type="evil", auto_map=auto_map)
    with pytest.raises(ModelRefused) as error:
        load_model(engine_config(source=str(tmp_path / "model")))
    assert str(error.value) == (
        f"{str(tmp_path / 'model')!r} cannot be loaded: it needs Python code that comes with it, which runs only with "
        "trust_remote_code: true"
    )
    assert not trap.sprung


def test_the_code_runs_if_the_model_s_arguments_say_so(trap: Trap, tmp_path: Path) -> None:
    trap.edit("config.json", model_type="evil", auto_map=AUTO_MAP)
    with pytest.raises(AttributeError, match="Evil"):
        load_model(engine_config(source=str(tmp_path / "model"), trust_remote_code=True))
    assert trap.sprung


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_an_attention_from_a_hub_is_refused(field: str, trap: Trap, tmp_path: Path) -> None:
    trap.edit("config.json", **{field: "evil/attention"})
    with pytest.raises(ModelRefused, match=r"attn_implementation in config\.json is 'evil/attention': code from there"):
        load_model(engine_config(source=str(tmp_path / "model")))


def test_pickled_code_among_the_weights_is_refused(trap: Trap, tmp_path: Path) -> None:
    trap.pickle_weights()
    with pytest.raises(ModelRefused, match="a weight file holds more than tensors, and pickled code is not run"):
        load_model(engine_config(source=str(tmp_path / "model")))
    assert not trap.sprung
