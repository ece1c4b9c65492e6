"""Prompts with images give the tokens and log-probabilities of transformers' plain forward: alone, in one batch with
text, in chunks, from the prefix cache, after a preemption, with adapters.
"""

import inspect
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForImageTextToText

from engines.compute.candidates import candidate_paths
from engines.compute.paged_model import PagedModel
from engines.config import EngineConfig
from engines.errors import AdapterRefused, ModelRefused, RequestRefused
from engines.model.loader import load_model, takes_images
from engines.protocol import Adapter, GenerateRequest
from tests.support import tiny_vision
from tests.support.engine_harness import DrivenEngine, Result
from tests.support.lora_files import adapter_at, save_with_peft
from tests.support.tiny_vision import IMAGE, asking, image_for

_FOLDER = tempfile.TemporaryDirectory(prefix="vision-tests-")
HYBRID = frozenset({"qwen3-5"})
NATIVE = ("qwen2.5-vl", "qwen3-vl", "llava", "smolvlm", "idefics3")
"""Those whose language model the C kernels compute unless told otherwise."""

BACKENDS = [*((name, "auto") for name in tiny_vision.CONFIGS), *((name, "sdpa") for name in NATIVE)]


@cache
def folder(name: str) -> Path:
    return tiny_vision.save(name, Path(_FOLDER.name) / name)


@cache
def plain(name: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder(name)).eval()


class VisionEngines:
    """Engines by model and settings, closed together."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, str], DrivenEngine] = {}

    def __call__(self, name: str, **settings: Any) -> DrivenEngine:
        key = (name, repr(sorted(settings.items())))
        if key not in self._started:
            hard = {"threads": 1, "kv_cache_bytes": 8 << 20, "max_running": 16, "context_length": 192, **settings}
            self._started[key] = DrivenEngine(EngineConfig(source=str(folder(name)), **hard))
        return self._started[key]

    def close(self) -> None:
        for engine in self._started.values():
            engine.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[VisionEngines]:
    started = VisionEngines()
    yield started
    started.close()


@torch.inference_mode()
def assert_plain(name: str, made: GenerateRequest, result: Result, model: Any = None) -> None:
    """Each token is the likeliest after those before it, by the plain forward over the whole text with its images. A
    plain forward takes a sampled image token for an image: what comes from there on is not compared.
    """
    assert result.error is None
    assert len(result.token_ids) == made.sampling.max_tokens
    count = result.token_ids.index(IMAGE) + 1 if IMAGE in result.token_ids else len(result.token_ids)
    assert count > 1
    text = [*made.prompt_token_ids, *result.token_ids[: count - 1]]
    rows = torch.log_softmax(plain_logits(model or plain(name), made, text), dim=-1)[len(made.prompt_token_ids) - 1 :]
    own = rows[torch.arange(count), result.token_ids[:count]]
    assert (rows.amax(dim=-1) - own).max() < 1e-4
    assert [score.logprob for score in result.logprobs[:count]] == pytest.approx(own.tolist(), abs=3e-4)


@torch.inference_mode()
def plain_logits(model: Any, made: GenerateRequest, text: Sequence[int]) -> torch.Tensor:
    """Of one plain forward over a text that begins with the request's prompt."""
    ids = torch.tensor([text])
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    takes = inspect.signature(model.model.forward).parameters
    types = (ids == IMAGE).int()
    inputs = {kind: types for kind in ("mm_token_type_ids", "token_type_ids") if kind in takes}
    tensors = _tensors(made)
    inputs |= {
        "attention_mask": torch.ones_like(ids),
        **{n: t.to(model.dtype) if t.is_floating_point() else t for n, t in tensors.items()},
    }
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    return logits.float()


def _tensors(made: GenerateRequest) -> dict[str, torch.Tensor]:
    """All images of a request as one call of the model takes them."""
    if not made.images:
        return {}
    host = [{name: _torch(tensor) for name, tensor in image.tensors.items()} for image in made.images]
    names = host[0].keys()
    has_tiles = "pixel_attention_mask" in names  # those of all images stand in one row
    return {name: torch.cat([h[name] for h in host], dim=int(has_tiles)) for name in names}


def _torch(tensor: Any) -> torch.Tensor:
    found = torch.frombuffer(bytearray(tensor.data), dtype={"<f4": torch.float32, "<i8": torch.int64}[tensor.dtype])
    return found.view(tensor.shape)


def mixed(name: str) -> list[GenerateRequest]:
    """Text alone, one image, two images, an image at the beginning, at the end."""
    first, second = image_for(name, 1), image_for(name, 2)
    return [
        asking(17),
        asking(5, first, 9),
        asking(3, first, 4, second, 6),
        asking(first, 12),
        asking(21, second),
        asking(40),
    ]


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
@torch.inference_mode()
def test_each_family_is_computed_on_its_fastest_path(name: str) -> None:
    config = EngineConfig(source=str(folder(name)), device="cpu")
    paths = candidate_paths(PagedModel.of(load_model(config), config), config, threads=1)
    assert type(next(paths)).__name__ == ("NativePath" if name in NATIVE else "PlainPath")


@pytest.mark.parametrize(("name", "attention"), BACKENDS)
def test_each_family_gives_the_tokens_of_its_plain_forward(name: str, attention: str, engines: VisionEngines) -> None:
    requests = mixed(name)
    engine = engines(name, attention=attention)
    for made, result in zip(requests, engine.generate(*requests), strict=True):
        assert_plain(name, made, result)
    for made in mixed(name):
        assert_plain(name, made, engine.one(made))


@pytest.mark.parametrize(("name", "attention"), BACKENDS)
def test_the_size_of_the_chunks_changes_nothing(name: str, attention: str, engines: VisionEngines) -> None:
    engine = engines(name, attention=attention, max_step_tokens=5, max_step_tokens_decoding=5)
    requests = mixed(name)
    for made, result in zip(requests, engine.generate(*requests), strict=True):
        assert_plain(name, made, result)


@pytest.mark.parametrize("name", [name for name in tiny_vision.CONFIGS if name not in HYBRID])
def test_a_warm_prefix_cache_tells_images_apart(name: str, engines: VisionEngines) -> None:
    engine = engines(name)
    seen, other = image_for(name, 3), image_for(name, 4)
    cached = []
    for image in (seen, seen, other):
        made = asking(60, image, 20)
        result = engine.one(made)
        assert_plain(name, made, result)
        cached.append(result.cached_tokens)
    whole = (82 + len(seen.token_ids) - 1) // 16 * 16  # one token at least is computed
    assert cached == [0, whole, 48], "the blocks before the image are shared, none with another image in it"


@pytest.mark.parametrize("max_step_tokens", [5, 512])
def test_an_image_counts_as_encoded_once_and_then_as_reused_whatever_the_chunks(
    max_step_tokens: int, engines: VisionEngines
) -> None:
    engine = engines("llava", max_step_tokens=max_step_tokens, max_step_tokens_decoding=max_step_tokens)
    before = engine.stats().counters
    first, second = image_for("llava", 11), image_for("llava", 12)
    engine.one(asking(3, first, 4))
    engine.one(asking(4, second, first, second))
    engine.one(asking(30))
    after = engine.stats().counters
    assert after.images_encoded - before.images_encoded == 2
    assert after.images_reused - before.images_reused == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NATIVE)
def test_with_the_kernels_bits_do_not_depend_on_company_or_chunks(
    name: str, dtype: str, engines: VisionEngines
) -> None:
    settings = {"attention": "native", "dtype": dtype, "prefix_cache": False}
    alone = [seen(engines(name, **settings).one(made)) for made in mixed(name)]
    chunked = engines(name, **settings, max_step_tokens=19, max_step_tokens_decoding=16)
    assert [seen(result) for result in chunked.generate(*mixed(name))] == alone


def seen(result: Result) -> object:
    return result.token_ids, result.logprobs, result.error


@pytest.mark.parametrize("name", NATIVE)
def test_with_the_kernels_a_bfloat16_model_stays_near_the_plain_forward(name: str, engines: VisionEngines) -> None:
    """As near as a text model, whatever part of the prompt is images."""
    model = AutoModelForImageTextToText.from_pretrained(folder(name), dtype=torch.bfloat16).eval()
    for made in mixed(name):
        made = replace(made, sampling=replace(made.sampling, max_tokens=1, prompt_logprobs=0))
        result = engines(name, attention="native", dtype="bfloat16").one(made)
        expected = torch.log_softmax(plain_logits(model, made, made.prompt_token_ids), dim=-1)
        own = expected[torch.arange(len(expected) - 1), made.prompt_token_ids[1:]]
        found = torch.tensor([score.logprob for score in result.prompt_logprobs if score is not None])
        assert float((found - own).abs().mean()) < 0.05


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_preempted_requests_are_computed_again_with_their_images(name: str, engines: VisionEngines) -> None:
    engine = engines(name, context_length=96, kv_cache_bytes=tiny_vision.kv_bytes(name, 8), max_step_tokens=24)
    first, second = image_for(name, 1), image_for(name, 2)
    made = lambda: [asking(9, first, max_tokens=40), asking(11, second, max_tokens=40), asking(12, max_tokens=40)]  # noqa: E731
    for request, result in engine.until_preempted(made):
        assert_plain(name, request, result)


def vision_adapter(name: str, kind: str, target_modules: str) -> Adapter:
    place = Path(_FOLDER.name) / f"{name}-{kind}"
    base = AutoModelForImageTextToText.from_pretrained(folder(name))
    torch.manual_seed(1)
    save_with_peft(base, LoraConfig(r=4, target_modules=target_modules), place)
    return adapter_at(place)


@pytest.mark.parametrize(("name", "attention"), BACKENDS)
def test_an_adapter_of_the_language_model_gives_the_tokens_of_peft(
    name: str, attention: str, engines: VisionEngines
) -> None:
    bound = vision_adapter(name, "language", r".*(language_model|text_model).*(q_proj|down_proj)")
    adapted = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(folder(name)), bound.directory
    ).eval()
    with_it = [replace(made, adapter=bound) for made in mixed(name)[:3]]
    requests = [*with_it, *mixed(name)[:3]]
    results = engines(name, attention=attention).generate(*requests)
    for made, result in zip(requests, results, strict=True):
        assert_plain(name, made, result, adapted.base_model.model if made.adapter else None)
    assert results[1].token_ids != results[4].token_ids, "a change of nothing proves nothing"


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_an_adapter_of_the_vision_tower_is_refused_by_name(name: str, engines: VisionEngines) -> None:
    bound = vision_adapter(name, "tower", r".*(visual|vision_tower|vision_model).*(qkv|q_proj|fc1|up_proj)")
    result = engines(name).one(replace(asking(9), adapter=bound))
    assert isinstance(result.error, AdapterRefused)
    assert re.search(r"visual|vision_tower|vision_model", str(result.error))


VOCABULARY = {"embedding": r".*(language_model|text_model).*embed_tokens", "head": "lm_head"}


@pytest.mark.parametrize("matrix", VOCABULARY)
@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_an_adapter_of_a_vocabulary_matrix_leaves_images_alone(name: str, matrix: str, engines: VisionEngines) -> None:
    bound = vision_adapter(name, matrix, VOCABULARY[matrix])
    adapted = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(folder(name)), bound.directory
    ).eval()
    first, second = replace(asking(30, image_for(name, 5), 4), adapter=bound), asking(3, image_for(name, 6), 4)
    results = engines(name).generate(first, second)
    assert_plain(name, first, results[0], adapted.base_model.model)
    assert_plain(name, second, results[1])


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_an_adapter_with_a_vocabulary_matrix_of_its_own_is_refused_by_name(name: str, engines: VisionEngines) -> None:
    place = Path(_FOLDER.name) / f"{name}-own-matrix"
    base = AutoModelForImageTextToText.from_pretrained(folder(name))
    save_with_peft(base, LoraConfig(r=4, target_modules=r".*v_proj", modules_to_save=["embed_tokens"]), place)
    result = engines(name).one(replace(asking(9), adapter=adapter_at(place)))
    assert isinstance(result.error, AdapterRefused)
    assert "modules_to_save is not supported, got ['embed_tokens']" in str(result.error)


@pytest.mark.parametrize("name", ["llava", "qwen3-vl", "smolvlm"])
def test_one_digest_with_other_tokens_is_encoded_again(name: str, engines: VisionEngines) -> None:
    made = asking(5, image_for(name, 1), 9)
    (image,) = made.images
    wider = replace(image, start=image.start - 1, length=image.length + 2)
    for request in (replace(made, request_id=f"{made.request_id}-wider", images=(wider,)), made):
        assert_plain(name, request, engines(name).one(request))


EXACT = [(name, attention) for name, attention in BACKENDS if name not in HYBRID | {"gemma3"}]


@pytest.mark.parametrize(("name", "attention"), EXACT)
def test_in_exact_mode_the_bits_are_those_of_the_request_alone(
    name: str, attention: str, engines: VisionEngines
) -> None:
    """In small chunks, with features that are computed again each time, with adapters beside it."""
    settings = {"attention": attention, "exact": True}
    bound = vision_adapter(name, "language", r".*(language_model|text_model).*(q_proj|down_proj)")
    made = lambda: [*mixed(name), *(replace(one, adapter=bound) for one in mixed(name)[:3])]  # noqa: E731
    calm = engines(name, **settings, prefix_cache=False)
    alone = [seen(calm.one(one)) for one in made()]
    hard = engines(name, **settings, max_step_tokens=19, max_step_tokens_decoding=16, image_cache_bytes=1)
    assert [seen(result) for result in hard.generate(*made())] == alone
    assert [seen(result) for result in hard.generate(*made())] == alone, "from the prefix cache"


@pytest.mark.parametrize(("name", "attention"), EXACT)
def test_in_exact_mode_tokens_are_those_of_the_plain_forward(name: str, attention: str, engines: VisionEngines) -> None:
    requests = mixed(name)
    results = engines(name, attention=attention, exact=True, prefix_cache=False).generate(*requests)
    for made, result in zip(requests, results, strict=True):
        assert_plain(name, made, result)


def test_exact_and_split_engines_serve_the_text_of_some_vision_models_or_nothing() -> None:
    """The class of Gemma 3's text is the class of its images too, so the class does not tell which is meant."""
    exact, split = {"exact": True, "device": "cpu"}, {"tensor_parallel": 2, "device": "cpu"}
    for name, settings, expected in (
        ("gemma3", exact, False),
        ("qwen3-vl", exact, True),
        ("gemma3", split, False),
    ):
        config = EngineConfig(source=str(folder(name)), **settings)
        assert takes_images(tiny_vision.CONFIGS[name](), config) is expected
    with pytest.raises(ModelRefused, match="tensor_parallel is not possible for qwen3_vl: it is a vision model"):
        takes_images(tiny_vision.CONFIGS["qwen3-vl"](), EngineConfig(source=str(folder("qwen3-vl")), **split))


def test_an_engine_that_serves_the_text_alone_refuses_images() -> None:
    config = EngineConfig(source=str(folder("gemma3")), threads=1, kv_cache_bytes=8 << 20, exact=True)
    with DrivenEngine(config) as engine:
        assert engine.one(asking(17)).error is None
        with pytest.raises(RequestRefused, match="takes no images"):
            engine.one(asking(5, image_for("gemma3", 1)))
