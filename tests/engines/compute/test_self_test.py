"""What the test at load time refuses: each way of computing something else that it was written for."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.attention.interface import NAME, paged_attention, register
from engines.compute import self_test
from engines.interface.errors import ModelRefused
from engines.model.loader import check_layer_types, load_model
from tests.support.engines.engine_harness import DrivenEngine, engine_config, model_folder
from tests.support.engines.runners import runner_of
from tests.support.engines.tiny_models import CONFIGS, HYBRID

Attention = Callable[..., tuple[torch.Tensor, None]]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def difference(name: str, attention: Attention = paged_attention, **settings: Any) -> float:
    """What the self-test says of a model whose attention is computed like this."""
    config = engine_config(name, attention="sdpa", **settings)
    loaded = load_model(config)
    test = self_test.prepare(loaded, loaded.context_length)
    runner = runner_of(loaded, config)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    try:
        return self_test.check(test, runner, loaded, config)
    finally:
        register()


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_model_that_is_computed_as_its_plain_forward_is_accepted(name: str) -> None:
    assert difference(name) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "lfm2"])
def test_what_a_short_dtype_explains_is_accepted(name: str, dtype: str) -> None:
    assert difference(name, dtype=dtype) < 0.05


def without(argument: str) -> Attention:
    def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return paged_attention(*args, **{**kwargs, argument: None})

    return attention


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("mistral", "sliding_window"),
        ("gemma2", "sliding_window"),
        ("gemma3", "sliding_window"),
        ("gpt-oss", "sliding_window"),
        ("gemma2", "softcap"),
        ("gpt-oss", "s_aux"),
    ],
)
def test_an_attention_that_ignores_what_a_layer_asks_for_is_refused(name: str, argument: str) -> None:
    with pytest.raises(ModelRefused, match=r"logits differ from the model's own by .* the limit for .* is"):
        difference(name, without(argument))


def both_directions(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Within a chunk, later tokens are seen too."""
    out, _ = paged_attention(module, query, key, value, *args, **kwargs)
    if query.shape[2] > 1:
        out = scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)
    return out, None


def one_token_late(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The values of a neighbour: what leaks from one sequence into the next."""
    return paged_attention(module, query, key, value.roll(1, dims=2), *args, **kwargs)


def never_finite_after_a_while(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """NaN for the shorter prompt alone."""
    out, _ = paged_attention(*args, **kwargs)
    row = 0
    for chunk in kwargs["paged"].batch.chunks:
        if len(chunk.sequence.token_ids) < 30:
            out[:, row : row + chunk.length] = float("nan")
        row += chunk.length
    return out, None


@pytest.mark.parametrize("attention", [both_directions, one_token_late, never_finite_after_a_while])
def test_an_attention_that_mixes_tokens_up_is_refused(attention: Attention) -> None:
    with pytest.raises(ModelRefused, match="logits differ from the model's own"):
        difference("llama", attention)


def variant(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of a tiny model with other entries in its configuration."""
    shutil.copytree(model_folder(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_layers_of_a_type_that_is_not_known_are_refused_by_name(tmp_path: Path) -> None:
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    source = str(variant("qwen3", tmp_path / "model", layer_types=kinds))
    with pytest.raises(ModelRefused, match="qwen3: layers of type 'chunked_attention' are not supported"):
        DrivenEngine(engine_config(source=source))


def test_attention_in_both_directions_is_refused_by_the_configuration(tmp_path: Path) -> None:
    source = str(variant("gemma3", tmp_path / "model", use_bidirectional_attention=True))
    with pytest.raises(ModelRefused, match="gemma3_text attends in both directions"):
        DrivenEngine(engine_config(source=source))


def test_attention_in_chunks_is_refused_by_the_configuration() -> None:
    config = CONFIGS["llama"]()
    check_layer_types(config)
    config.attention_chunk_size = 8192
    with pytest.raises(ModelRefused, match="llama: chunked attention is not supported"):
        check_layer_types(config)


MODELING = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama


class OddForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(self.odd, with_kwargs=True)

    def odd(self, module, args, kwargs):
        length = kwargs["hidden_states"].shape[1]
        return args, {**kwargs, %s}
"""


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            '"indices": torch.zeros(length)',
            "passes the attention argument 'indices', which this engine does not support",
        ),
        ('"attention_mask": torch.zeros(1, 1, length, length)', "passes an attention mask"),
    ],
)
def test_a_model_that_says_something_unknown_to_its_attention_is_refused(
    argument: str, message: str, tmp_path: Path
) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    folder = variant("llama", tmp_path / f"odd-{len(argument)}", auto_map=auto_map)
    (folder / "modeling_odd.py").write_text(MODELING % argument)
    with pytest.raises(ModelRefused, match=message):
        DrivenEngine(engine_config(source=str(folder), trust_remote_code=True))


@pytest.mark.parametrize("name", sorted(HYBRID))
def test_exact_is_refused_where_it_cannot_be_had(name: str) -> None:
    with pytest.raises(ModelRefused, match="exact is not possible with layers that carry a state"):
        DrivenEngine(engine_config(name, exact=True))


def test_bits_that_change_with_the_company_are_refused_in_exact_mode() -> None:
    config = engine_config("qwen3-moe")
    loaded = load_model(config)
    test = self_test.prepare(loaded, loaded.context_length)
    with pytest.raises(ModelRefused, match="exact is not possible on cpu\\. Logits change with the batch"):
        self_test.check_exact(test, runner_of(loaded, config), loaded, config)
