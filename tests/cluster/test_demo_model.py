"""The demo's base model: from GGUF to an ordinary folder, whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.files.tiny_gguf import CONTEXT, tiny_vocabulary, write_gguf
from tests.support.processes.demo_modules import prepare_demo

Converted = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The converted folder, and the weights that went into the GGUF file."""
    folder = tmp_path_factory.mktemp("converted")
    weights = write_gguf(folder / "tiny.gguf").state_dict()
    prepare_demo.prepare_model(folder / "models" / "tiny", folder / "tiny.gguf")
    return folder / "models" / "tiny", weights


def test_the_converted_weights_are_those_of_the_file_in_bf16(converted: Converted) -> None:
    folder, weights = converted
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.state_dict().keys() == weights.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name].to(torch.bfloat16)), name


def test_the_converted_config_serves(converted: Converted) -> None:
    folder, _ = converted
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert config["max_position_embeddings"] == CONTEXT
    assert config["rms_norm_eps"] == 1e-06
    assert "quantization_config" not in config
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_token_ids_are_those_of_the_file(converted: Converted) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    tokens, _ = tiny_vocabulary()
    assert len(tokenizer) == len(tokens)
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert tokenizer.all_special_ids == [1, 2, 0]
    assert tokenizer.model_max_length == CONTEXT


def test_numbers_are_split_off_before_spaces_are_joined(converted: Converted) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.tokenize("the  42") == ["the", "ĠĠ", "4", "2"]


@pytest.mark.parametrize("text", ["", " a  b\n\n\tc ", "12 + 3 = 15", "naïve € 漢字 🙂", "<|im_end|> as text"])
def test_text_comes_back_from_its_ids(converted: Converted, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_comes_along_and_its_markers_are_single_tokens(converted: Converted) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True).input_ids
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (ids.count(1), ids.count(2)) == (2, 1)


def test_a_second_run_leaves_the_folder_alone_unless_another_converter_made_it(tmp_path: Path) -> None:
    gguf, model = tmp_path / "tiny.gguf", tmp_path / "model"
    write_gguf(gguf)
    prepare_demo.prepare_model(model, gguf)
    (model / "added later").touch()
    prepare_demo.prepare_model(model, gguf)
    assert (model / "added later").exists()
    marker = model / prepare_demo.SOURCE_FILE
    current = marker.read_text()
    marker.write_text("another converter")
    prepare_demo.prepare_model(model, gguf)
    assert marker.read_text() == current
    assert not (model / "added later").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tiny.gguf"]


def test_a_file_of_another_tokenizer_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre_tokenizer="llama-bpe")
    with pytest.raises(
        SystemExit, match=r"tiny\.gguf: tokenizer \('gpt2', 'llama-bpe'\) is not .* \('gpt2', 'smollm'\)"
    ):
        prepare_demo.prepare_model(tmp_path / "models" / "tiny", tmp_path / "tiny.gguf")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_conversion_that_loses_a_token_is_refused(converted: Converted) -> None:
    folder, _ = converted
    tokens, _ = tiny_vocabulary()
    with pytest.raises(SystemExit, match="ids are not those of the GGUF vocabulary"):
        prepare_demo.check_model(folder, [*tokens[:-1], "another"])
