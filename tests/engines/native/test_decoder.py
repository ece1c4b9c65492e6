"""The C kernels under the engine: the plain model's tokens, and bits that do not depend on the company, in float32 and
in bfloat16, on the instructions of this machine and on those that every machine has.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.compute import self_test
from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.model.loader import load_model
from engines.native.build import library_path
from engines.native.structure import Unsupported, read_structure
from tests.support.engines.engine_harness import (
    DrivenEngine,
    Result,
    adapter,
    clear_prompt,
    engine_config,
    explosive_folder,
    prompt_of,
    reference_greedy,
    request,
)
from tests.support.engines.runners import runner_of

SOURCES = Path(__file__).parents[3] / "engines" / "native" / "src"
MODELS = ("llama", "llama-tied", "qwen2", "qwen3", "mistral")
KINDS = (None, "q-v", "all", "head", "embedding", "wide")
BUILDS = {"native": None, "no-amx": ("-march=native", "-mno-amx-bf16"), "baseline": ()}


@pytest.fixture(scope="module", params=["native", pytest.param("no-amx", marks=pytest.mark.slow), "baseline"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The usual cache folder, or one whose library was built for fewer instructions than the machine has."""
    usual = library_path(Path(EngineConfig("unused").kernel_cache).expanduser())
    flags = BUILDS[request.param]
    if flags is None:
        return str(usual.parent)
    own = tmp_path_factory.mktemp(f"kernels-{request.param}") / usual.name
    command = ["cc", "-O3", *flags, "-shared", "-fPIC", "-pthread", "-o", own, SOURCES / "model.c", "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    return str(own.parent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_are_the_plain_models(kernels: str, name: str, dtype: str) -> None:
    config = engine_config(name, attention="native", kernel_cache=kernels, dtype=dtype, threads=2)
    loaded = load_model(config)
    test = self_test.prepare(loaded, loaded.context_length)
    difference = self_test.check(test, runner_of(loaded, config, threads=2), loaded, config)
    assert difference < (5e-6 if dtype == "float32" else 0.05)


@pytest.fixture(scope="module")
def engine(kernels: str) -> Iterator[DrivenEngine]:
    with DrivenEngine(engine_config("qwen3", attention="native", kernel_cache=kernels, threads=2)) as engine:
        yield engine


def test_adapters_of_all_kinds_in_one_batch_give_pefts_tokens(engine: DrivenEngine) -> None:
    bounds = [adapter("qwen3", kind) if kind else None for kind in KINDS]
    prompts = [clear_prompt("qwen3", 20 + 9 * i, 6, bounds=(bound,)) for i, bound in enumerate(bounds)]
    asked = [request(p, adapter=bound, max_tokens=6) for p, bound in zip(prompts, bounds, strict=True)]
    found = [tuple(result.token_ids) for result in engine.generate(*asked)]
    assert found == [reference_greedy("qwen3", bound, p, 6)[0] for p, bound in zip(prompts, bounds, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_bits_do_not_depend_on_company_or_chunking(kernels: str, name: str, dtype: str) -> None:
    settings = {"attention": "native", "kernel_cache": kernels, "dtype": dtype, "prefix_cache": False}
    asked = [(prompt_of(7 + 23 * i), adapter(name, kind) if kind else None) for i, kind in enumerate(KINDS)]
    with DrivenEngine(engine_config(name, **settings, threads=1)) as whole:
        alone = [seen(whole.one(request(p, adapter=bound, logprobs=3))) for p, bound in asked]
    with DrivenEngine(
        engine_config(name, **settings, threads=3, max_step_tokens=19, max_step_tokens_decoding=16)
    ) as chunked:
        together = chunked.generate(*[request(p, adapter=bound, logprobs=3) for p, bound in asked])
    assert [seen(result) for result in together] == alone


def seen(result: Result) -> object:
    return result.token_ids, result.logprobs, result.error


def derive_the_mlp(mlp: nn.Module) -> None:
    mlp.__class__ = type("MyMLP", (type(mlp),), {})


def replace_a_forward(mlp: nn.Module) -> None:
    mlp.forward = lambda x: x


def test_kernels_that_were_demanded_and_cannot_be_had_are_an_error(tmp_path: Path) -> None:
    config = engine_config("gemma2", attention="native", kernel_cache=str(tmp_path))
    with pytest.raises(ModelRefused, match="attention = 'native' is not possible here: a model of class Gemma2ForCaus"):
        DrivenEngine(config)


def test_a_model_with_code_of_its_own_is_not_computed_as_what_it_was_derived_from(kernels: str) -> None:
    settings = {"source": str(explosive_folder()), "trust_remote_code": True, "self_test": False}
    config = engine_config(**settings, attention="native", kernel_cache=kernels)
    with pytest.raises(ModelRefused, match="'native' is not possible here: a model of class ExplosiveForCausalLM"):
        DrivenEngine(config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (derive_the_mlp, r"model\.layers\.1\.mlp is of class MyMLP, which is not transformers' own"),
        (replace_a_forward, r"model\.layers\.1\.mlp has a forward of its own"),
    ],
)
def test_a_changed_module_is_not_computed_as_what_it_was(change: Callable[[nn.Module], None], reason: str) -> None:
    loaded = load_model(engine_config("llama"))
    change(loaded.model.model.layers[1].mlp)
    with pytest.raises(Unsupported, match=reason):
        read_structure(loaded, {})


def test_a_cache_folder_that_cannot_be_used_leaves_torch(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    prompt = clear_prompt("llama", 12, 4)
    with DrivenEngine(engine_config("llama", kernel_cache=str(blocked / "below"))) as engine:
        assert (
            tuple(engine.one(request(prompt, max_tokens=4)).token_ids) == reference_greedy("llama", None, prompt, 4)[0]
        )


@torch.inference_mode()
def test_weights_are_not_held_twice(kernels: str) -> None:
    config = engine_config("llama", attention="native", kernel_cache=kernels)
    loaded = load_model(config)
    layers = list(loaded.model.model.layers)
    runner_of(loaded, config, threads=1)
    left = [name for layer in layers for name, weight in layer.named_parameters() if weight.numel() and "proj" in name]
    assert left == []


def test_the_exact_mode_may_use_all_threads(kernels: str) -> None:
    asked = [prompt_of(7 + 23 * i) for i in range(3)]
    found = []
    for threads in (1, 3):
        config = engine_config("qwen3", attention="native", kernel_cache=kernels, exact=True, threads=threads)
        with DrivenEngine(config) as engine:
            found.append([seen(result) for result in engine.generate(*(request(p, logprobs=3) for p in asked))])
    assert found[0] == found[1]
