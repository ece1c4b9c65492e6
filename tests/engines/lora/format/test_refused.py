"""What cannot be applied exactly is refused, by the name of the file, field or tensor."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from engines.interface.errors import AdapterRefused
from engines.interface.protocol import Adapter
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from engines.lora.format.targets import LoraTargets
from engines.lora.format.weights import read_adapter
from tests.support.files.lora_files import random_model, read, save_with_peft, targets_of, write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
LIMITS = {"max_rank": 64, "max_bytes": 1 << 20}


@pytest.fixture(scope="module")
def llama() -> LoraTargets:
    return targets_of("llama")


def _q(r: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"{Q}.lora_A.weight": torch.ones(r, 64, dtype=dtype), f"{Q}.lora_B.weight": torch.ones(128, r, dtype=dtype)}


FIELDS: dict[str, tuple[Mapping[str, Any], str]] = {
    "peft_type": ({"peft_type": "LOHA"}, "peft_type must be 'LORA', not 'LOHA'"),
    "no peft_type": ({"peft_type": None}, "peft_type must be 'LORA', not None"),
    "DoRA": ({"use_dora": True}, "use_dora is not supported, got True"),
    "lora_bias": ({"lora_bias": True}, "lora_bias is not supported"),
    "bias": ({"bias": "all"}, "bias must be 'none', not 'all'"),
    "modules_to_save": ({"modules_to_save": ["norm"]}, r"modules_to_save is not supported, got \['norm'\]"),
    "aLoRA": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
    "QALoRA": ({"use_qalora": True}, "use_qalora is not supported"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is not supported"),
    "tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices is not supported"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
    "arrow": ({"arrow_config": {"top_k": 3}}, "arrow_config is not supported"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' trains against changed base"),
    "olora": ({"init_lora_weights": "OLoRA"}, "init_lora_weights 'OLoRA'"),
    "corda": ({"init_lora_weights": "corda"}, "init_lora_weights 'corda'"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq'"),
    "an unknown init": ({"init_lora_weights": "new"}, "init_lora_weights 'new'"),
    "an unhashable init": ({"init_lora_weights": [1]}, r"init_lora_weights \[1\]"),
    "an unknown switch": ({"use_xlora": True}, "'use_xlora' is not a known field, got True"),
    "an unknown section": ({"xlora_config": {"a": 1}}, "'xlora_config' is not a known field"),
    "rank of another type": ({"r": "4"}, "r must be a positive integer, not '4'"),
    "rank true": ({"r": True}, "r must be a positive integer, not True"),
    "rank zero": ({"r": 0}, "r must be a positive integer, not 0"),
    "alpha": ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
    "infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha must be a number, not inf"),
    "NaN alpha": ({"alpha_pattern": {"q_proj": float("nan")}}, r"alpha_pattern\['q_proj'\] must be a number, not nan"),
    "rank pattern": ({"rank_pattern": {"q_proj": 1.5}}, r"rank_pattern\['q_proj'\] must be a positive integer"),
    "pattern of another type": ({"rank_pattern": [1]}, r"rank_pattern must be an object, not \[1\]"),
    "rslora": ({"use_rslora": "yes"}, "use_rslora must be true or false, not 'yes'"),
    "targets": ({"target_modules": [1]}, r"target_modules must be a list of strings, not \[1\]"),
    "layers": ({"layers_to_transform": [0.5]}, "layers_to_transform must be integers"),
    "layers of an expression": (
        {"target_modules": ".*", "layers_to_transform": [0]},
        "layers_to_transform cannot go with",
    ),
    "layers pattern": ({"layers_pattern": "(a|b)"}, "layers_pattern must be plain names"),
    "a target that is not named": ({"target_modules": ["k_proj"]}, "it does not target '.*self_attn.q_proj'"),
    "an expression that does not name it": ({"target_modules": r".*\.k_proj"}, "it does not target"),
    "an excluded target": ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "it does not target"),
    "excluded by expression": ({"exclude_modules": ".*attn.*"}, "it does not target"),
    "another layer": ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "it does not target"),
    "no layer": (
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks"]},
        "it does not target",
    ),
    "another rank": ({"r": 8}, r"has lora_A of shape \[4, 64\], the configuration says rank 8"),
    "another rank by pattern": ({"rank_pattern": {"q_proj": 2}}, "the configuration says rank 2"),
    "many expressions": ({"rank_pattern": {f"{i}.*": 4 for i in range(1001)}}, "has more than 1000 keys that are expr"),
    "a back reference": (
        {"alpha_pattern": {r"(a)\1": 2}},
        r"the expression '\(a\)\\\\1' of alpha_pattern uses the escape \\1\.",
    ),
    "no expression": (
        {"target_modules": "("},
        r"the expression '\(' of target_modules is not a regular expression: missing \), unterminated subpattern",
    ),
    "no expression to exclude": (
        {"exclude_modules": "a**"},
        "the expression 'a\\*\\*' of exclude_modules is not a regul",
    ),
    "no expression as a key": ({"rank_pattern": {"q(": 4}}, r"the expression 'q\(' of rank_pattern is not a regular"),
    "a fuzzy expression": ({"target_modules": "(?:q_proj){e<=1}"}, r"of target_modules uses '\{' at position 10"),
    "a layer that an expression does not name": (
        {"target_modules": r".*layers\.[1-9]\..*"},
        r"it does not target '.*layers\.0\.self_attn\.q_proj'",
    ),
    "dots everywhere": (
        {"rank_pattern": {f"{i:08b}".replace("0", ".").replace("1", "q"): 4 for i in range(101)}},
        "has keys of 8 characters with dots in more than 100 different places",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_is_refused_by_name(case: str, llama: LoraTargets, tmp_path: Path) -> None:
    fields, message = FIELDS[case]
    write_adapter(tmp_path, fields, _q())
    with pytest.raises(AdapterRefused, match=rf"^adapter_(config\.json|model\.safetensors): .*{message}"):
        read(tmp_path, llama)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"LORA"', "[" * 100_000, '{"r": ' + "9" * 5000 + "}", "\udcff"])
def test_a_configuration_that_is_no_object_is_refused(text: str, llama: LoraTargets, tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, _q())
    (tmp_path / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json: it is not (JSON|a JSON object)\."):
        read(tmp_path, llama)


@pytest.mark.parametrize(
    "expression",
    ["(a+)+b", "(.*.*.*.*)*x", "(a|aa|a*)*" * 50 + "b", "((a{0,9999}){0,9999}){0,9999}", "(" * 20 + ".*" + ")*" * 20],
)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"])
@pytest.mark.timeout(20)
def test_expressions_that_make_re_backtrack_for_hours_do_not(
    field: str, expression: str, llama: LoraTargets, tmp_path: Path
) -> None:
    value: object = {expression: 4} if "pattern" in field else expression
    write_adapter(tmp_path, {field: value}, _q())
    with contextlib.suppress(AdapterRefused):
        assert read(tmp_path, llama).rank == 4


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


def _module(path: str, inputs: int, outputs: int, *lead: int) -> dict[str, torch.Tensor | None]:
    return {
        f"{path}.lora_A.weight": torch.ones(*lead, 4, inputs),
        f"{path}.lora_B.weight": torch.ones(*lead, outputs, 4),
    }


TENSORS: dict[str, tuple[Mapping[str, torch.Tensor | None], str]] = {
    "none": ({A: None, B: None}, "it holds no LoRA tensors"),
    "no B": ({B: None}, "q_proj' has lora_A without the other matrix"),
    "no A": ({A: None}, "q_proj' has lora_B without the other matrix"),
    "integers": ({A: torch.ones(4, 64, dtype=torch.int32)}, "lora_A.weight' has dtype I32; it must be one of F64, F32"),
    "eight bits": ({A: torch.ones(4, 64).to(torch.float8_e4m3fn)}, "has dtype F8_E4M3"),
    "NaN": ({B: torch.full((128, 4), float("nan"))}, "lora_B.weight' holds NaN or infinity"),
    "infinity": ({A: torch.full((4, 64), float("-inf"))}, "lora_A.weight' holds NaN or infinity"),
    "inputs": ({A: torch.ones(4, 63)}, r"\[4, 63\] and \[128, 4\], which do not fit .* 64 inputs and 128 outputs"),
    "outputs": ({B: torch.ones(64, 4)}, r"\[4, 64\] and \[64, 4\], which do not fit"),
    "ranks of A and B": ({B: torch.ones(128, 3)}, r"\[4, 64\] and \[128, 3\], which do not fit"),
    "three dimensions": ({A: torch.ones(1, 4, 64), B: torch.ones(1, 128, 4)}, r"has lora_A of shape \[1, 4, 64\]"),
    "one dimension": ({A: torch.ones(4)}, r"has the shapes \[4\] and \[128, 4\], which are not matrices"),
    "no dimension": ({A: torch.ones(())}, r"has the shapes \[\] and \[128, 4\], which are not matrices"),
    "flat B": ({B: torch.ones(4)}, r"\[4, 64\] and \[4\], which are not matrices"),
    "no values": ({A: torch.ones(4, 0)}, r"q_proj' has the shapes \[4, 0\] and \[128, 4\], which are not matrices"),
    "no rank": (
        {A: torch.ones(0, 64), B: torch.ones(128, 0)},
        r"q_proj' has the shapes \[0, 64\] and \[128, 0\], which are not matrices",
    ),
    "DoRA magnitude": ({f"{Q}.lora_magnitude_vector": torch.ones(128)}, "lora_magnitude_vector' is not a tensor of"),
    "bias of B": ({f"{Q}.lora_B.bias": torch.ones(128)}, "lora_B.bias' is not a tensor of"),
    "bias": ({f"{Q}.bias": torch.ones(128)}, "q_proj.bias' is not a tensor of"),
    "a whole matrix": ({f"{Q}.weight": torch.ones(128, 64)}, "q_proj.weight' is not a tensor of"),
    "a whole norm": ({"base_model.model.model.norm.weight": torch.ones(64)}, "norm.weight' is not a tensor of"),
    "a base layer": ({f"{Q}.base_layer.weight": torch.ones(128, 64)}, "is not a vocabulary matrix of the base model"),
    "an adapter's name": ({f"{Q}.lora_A.default.weight": torch.ones(4, 64)}, "lora_A.default.weight' is not a tensor"),
    "a resized vocabulary": (
        {"base_model.model.lm_head.base_layer.weight": torch.ones(330, 64)},
        r"shape \[330, 64\], the base model's \[320, 64\]: a resized vocabulary",
    ),
    "a resized embedding": ({"base_model.model.model.embed_tokens.weight": torch.ones(320, 65)}, "a resized vocab"),
    "an unknown module": (
        _module(f"{Q}x", 64, 128),
        "self_attn.q_projx' is not a module of the base model",
    ),
    "an unknown layer": (
        _module("model.layers.3.mlp.up_proj", 64, 96),
        "layers.3.mlp.up_proj' is not a module of the base model",
    ),
    "experts of a dense model": (
        _module("model.layers.0.mlp.experts.w1", 64, 96, 4),
        "experts.w1' is not a module of the base model",
    ),
    "one expert of a dense model": (
        _module("model.layers.0.mlp.experts.0.up_proj", 64, 96),
        "experts.0.up_proj' is not a module of the base model",
    ),
    "nested wrappers": (
        _module(f"{Q}.base_layer", 64, 128),
        "has nested wrappers",
    ),
    "an embedding of a linear layer": (
        {A: None, B: None, f"{Q}.lora_embedding_A": torch.ones(4, 64), f"{Q}.lora_embedding_B": torch.ones(128, 4)},
        "has tensors of another kind than the base model's linear layer takes",
    ),
    "a linear layer of an embedding": (
        _module("model.embed_tokens", 320, 64),
        "has tensors of another kind than the base model's embedding layer takes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_is_refused_by_name(case: str, llama: LoraTargets, tmp_path: Path) -> None:
    changes, message = TENSORS[case]
    tensors = {name: tensor for name, tensor in {**_q(), **changes}.items() if tensor is not None}
    write_adapter(tmp_path, {}, tensors)
    with pytest.raises(AdapterRefused, match=rf"^adapter_model\.safetensors: .*{message}"):
        read(tmp_path, llama)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@given(position=st.integers(0, 4 * 64 - 1))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_value_that_is_not_finite_is_found_anywhere(
    value: float, dtype: torch.dtype, llama: LoraTargets, tmp_path: Path, position: int
) -> None:
    tensors = _q(dtype=dtype)
    tensors[A].view(-1)[position] = value
    with pytest.raises(AdapterRefused, match=r"lora_A\.weight' holds NaN or infinity"):
        read(write_adapter(tmp_path, {}, tensors), llama)


def test_finite_values_of_mixed_types_pass(llama: LoraTargets, tmp_path: Path) -> None:
    mixed = {A: torch.ones(4, 64).bfloat16(), B: torch.full((128, 4), 6e4).half()}
    pair = read(write_adapter(tmp_path, {}, mixed), llama).pairs["model.layers.0.self_attn.q_proj"]
    assert (pair.A.dtype, pair.B.dtype) == (torch.bfloat16, torch.float16)


def test_a_rank_over_the_limit_is_refused(llama: LoraTargets, tmp_path: Path) -> None:
    write_adapter(tmp_path, {"r": 9}, _q(9))
    assert read(tmp_path, llama, max_rank=9).rank == 9
    with pytest.raises(AdapterRefused, match="q_proj' has rank 9; the limit is 8"):
        read(tmp_path, llama, max_rank=8)


def test_a_file_over_the_limit_is_refused_unread(llama: LoraTargets, tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, _q())
    size = (tmp_path / WEIGHTS_FILE).stat().st_size
    assert read(tmp_path, llama, max_bytes=size)
    with pytest.raises(AdapterRefused, match=f"{WEIGHTS_FILE} has {size} bytes; the limit is {size - 1}"):
        read(tmp_path, llama, max_bytes=size - 1)
    os.truncate(tmp_path / WEIGHTS_FILE, 1 << 40)  # sparse: nothing could hold it
    with pytest.raises(AdapterRefused, match="the limit is 1048576"):
        read_adapter(Adapter("0" * 64, str(tmp_path)), llama, **LIMITS)


def test_the_vocabulary_s_copy_must_be_the_base_s_to_the_bit(tmp_path: Path) -> None:
    model = random_model("llama")
    targets = LoraTargets.of(model)
    matrix = model.lm_head.weight.detach().clone()
    head = {
        f"base_model.model.lm_head.lora_{x}.weight": t for x, t in (("A", torch.ones(4, 64)), ("B", torch.ones(320, 4)))
    }
    assert read(write_adapter(tmp_path, {}, {**head, "base_model.model.lm_head.base_layer.weight": matrix}), targets)
    matrix[319, 63] += 1e-6
    with pytest.raises(AdapterRefused, match=r"lm_head\.base_layer\.weight' differs from the base model's"):
        read(write_adapter(tmp_path, {}, {**head, "base_model.model.lm_head.base_layer.weight": matrix}), targets)


def test_a_tied_adapter_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    save_with_peft(random_model("llama-tied"), config, tmp_path)
    with pytest.raises(AdapterRefused, match="ensure_weight_tying is not supported"):
        read(tmp_path, targets_of("llama-tied"))


def test_parameters_that_the_configuration_does_not_name_are_refused(tmp_path: Path) -> None:
    config = LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], r=4)
    save_with_peft(random_model("qwen3-moe"), config, tmp_path)
    raw = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**raw, "target_parameters": ["experts.gate_up_proj"]}))
    with pytest.raises(AdapterRefused, match="target_parameters does not name all parameters"):
        read(tmp_path, targets_of("qwen3-moe"))
