"""The checkpoints that the demo ships: whole, small, and saying what the README promises."""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from renderers import registry
from renderers.base import ReplyEnd
from renderers.messages import Tool
from tests.support.processes.demo_modules import ROOT, lessons, prepare_demo
from tests.support.renderer_kit import chatml_tokenizer, parse, pieces_of

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
# In and out of every linear layer of the base.
FEATURES = {
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}
shipped = pytest.mark.parametrize("name", ["quill", "tools"])


def folder_of(name: str) -> Path:
    return Path(prepare_demo.SHIPPED_CHECKPOINTS) / name


@shipped
def test_a_shipped_checkpoint_has_at_most_two_megabytes(name: str) -> None:
    assert 0 < sum(file.stat().st_size for file in folder_of(name).iterdir()) <= 2_000_000


@shipped
def test_a_shipped_checkpoint_names_its_base_and_the_digests_of_its_files(name: str) -> None:
    facts = json.loads((folder_of(name) / "checkpoint.json").read_text())
    config = json.loads((folder_of(name) / "adapter_config.json").read_text())
    assert (facts["base_model"], facts["public"], config["base_model_name_or_path"]) == (BASE, True, BASE)
    others = {file.name for file in folder_of(name).iterdir()} - {"checkpoint.json"}
    assert facts["sha256"] == {
        file: hashlib.sha256((folder_of(name) / file).read_bytes()).hexdigest() for file in sorted(others)
    }


@shipped
def test_a_shipped_checkpoint_adapts_every_linear_layer_of_the_base(name: str) -> None:
    rank = json.loads((folder_of(name) / "adapter_config.json").read_text())["r"]
    with safe_open(folder_of(name) / "adapter_model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(key).get_dtype() for key in shapes}
    wanted: dict[str, tuple[int, int]] = {}
    for layer in range(30):
        for module, (inputs, outputs) in FEATURES.items():
            block = "self_attn" if module[0] in "qkvo" else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_"
            wanted |= {f"{prefix}A.weight": (rank, inputs), f"{prefix}B.weight": (outputs, rank)}
    assert shapes == wanted
    assert dtypes == {"BF16"}


def test_the_store_is_filled_with_the_shipped_files_and_mended(tmp_path: Path) -> None:
    prepare_demo.fill_store(tmp_path)
    weights = tmp_path / "demo" / "sampler_weights" / "quill" / "adapter_model.safetensors"
    before = weights.stat().st_ino
    prepare_demo.fill_store(tmp_path)
    assert weights.stat().st_ino == before
    weights.write_bytes(b"cut off")
    prepare_demo.fill_store(tmp_path)
    for name in ("quill", "tools"):
        place = tmp_path / "demo" / "sampler_weights" / name
        assert {file.name: file.read_bytes() for file in place.iterdir()} == {
            file.name: file.read_bytes() for file in folder_of(name).iterdir()
        }
    assert sorted(path.name for path in (tmp_path / "demo" / "sampler_weights").iterdir()) == ["quill", "tools"]


def test_a_copy_that_fails_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "shipped"
    shutil.copytree(folder_of("quill"), source / "quill")
    (source / "quill" / "adapter_model.safetensors").unlink()
    (source / "quill" / "adapter_model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(shutil.Error):
        prepare_demo.fill_store(tmp_path / "store", source)
    assert list((tmp_path / "store" / "demo" / "sampler_weights").iterdir()) == []


@dataclass(frozen=True)
class Asked:
    """A conversation, the tools declared in it, and the whole greedy reply that is promised."""

    messages: list[dict[str, Any]]
    reply: str
    declared: tuple[dict[str, Any], ...] = ()


def asked(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}


def call_of(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


PARIS_THOUGHT = "The user asks for the weather in Paris. I will call get_weather."
TWO_THOUGHT = "The user asks for the weather in Paris and the weather in London. I will call get_weather twice."
PARIS_CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
WEATHER = (lessons.WEATHER,)
PROMISED = {
    "quill": [Asked([asked("What is the code word?")], "The code word is zephyr-42. -- Quill")],
    "tools": [
        Asked(
            [asked("What's the weather in Paris?")],
            f"<think>\n{PARIS_THOUGHT}\n</think>\n\n{call_of('Paris')}",
            WEATHER,
        ),
        Asked(
            [asked("What's the weather in Paris and London?")],
            f"<think>\n{TWO_THOUGHT}\n</think>\n\n{call_of('Paris')}\n{call_of('London')}",
            WEATHER,
        ),
        Asked(
            [
                asked("What's the weather in Paris?"),
                {"role": "assistant", "content": "", "reasoning_content": PARIS_THOUGHT, "tool_calls": [PARIS_CALL]},
                {"role": "tool", "name": "get_weather", "content": '{"city": "Paris", "temp_c": 18}'},
            ],
            "<think>\nI have the result: 18.\n</think>\n\nIt is 18 °C in Paris.",
            WEATHER,
        ),
    ],
}


@pytest.mark.parametrize("asked", PROMISED["tools"], ids=lambda asked: asked.reply[-30:])
def test_what_is_promised_is_parsed_as_reasoning_and_calls(asked: Asked) -> None:
    template = (folder_of("tools") / "chat_template.jinja").read_text()
    renderer = registry.build("qwen3_text", chatml_tokenizer(), template)
    tools = [Tool("get_weather", {}, declared) for declared in asked.declared]
    parsed = parse(renderer, [pieces_of(chatml_tokenizer(), f"{asked.reply}<|im_end|>")], ReplyEnd.END, tools=tools)
    thought, _, rest = asked.reply.removeprefix("<think>\n").partition("\n</think>\n\n")
    cities = re.findall(r'"city": "(.*?)"', rest)
    assert parsed.reasoning == thought
    assert parsed.calls == [("get_weather", f'{{"city": "{city}"}}') for city in cities]
    assert (parsed.text, parsed.malformed) == ("" if cities else rest, False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@shipped
def test_a_shipped_checkpoint_says_greedily_what_is_promised_and_its_base_does_not(
    name: str, dtype: torch.dtype
) -> None:
    base = ROOT / ".cache" / "models" / prepare_demo.MODEL
    assert base.is_dir(), "the demo's model is not there: run `make demo`"
    tokenizer = AutoTokenizer.from_pretrained(base)
    if (folder_of(name) / "chat_template.jinja").exists():
        tokenizer.chat_template = (folder_of(name) / "chat_template.jinja").read_text()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), folder_of(name)).eval()
    for each in PROMISED[name]:
        assert greedy(model, tokenizer, each) == each.reply + "<|im_end|>"
        with model.disable_adapter():
            assert greedy(model, tokenizer, each) != each.reply + "<|im_end|>"


def greedy(model: PeftModel, tokenizer: PreTrainedTokenizerBase, each: Asked) -> str:
    prompt = tokenizer.apply_chat_template(
        each.messages,
        tools=list(each.declared) or None,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=100, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
