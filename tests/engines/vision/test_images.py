"""Prompts with images give the tokens and log-probabilities of transformers' plain forward: alone, in one batch with
text, in chunks, from the prefix cache, after a preemption, with adapters.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText

from engines.compute.candidates import candidate_paths
from engines.compute.paged_model import PagedModel
from engines.interface.config import EngineConfig
from engines.interface.errors import AdapterRefused, RequestRefused
from engines.model.loader import load_model, takes_images
from tests.support.engines import tiny_vision
from tests.support.engines.engine_harness import DrivenEngine
from tests.support.engines.tiny_vision import asking, image_for
from tests.support.engines.vision_harness import (
    VisionEngines,
    assert_plain,
    folder,
    mixed,
    plain_logits,
    seen,
    vision_adapter,
    with_peft,
)
from tests.support.files.lora_files import adapter_at, save_with_peft

HYBRID = frozenset({"qwen3-5"})
NATIVE = ("qwen2.5-vl", "qwen3-vl", "llava", "smolvlm", "idefics3")
"""Those whose language model the C kernels compute unless told otherwise."""

BACKENDS = [*((name, "auto") for name in tiny_vision.CONFIGS), *((name, "sdpa") for name in NATIVE)]


@pytest.fixture(scope="module")
def engines() -> Iterator[VisionEngines]:
    started = VisionEngines()
    yield started
    started.close()


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


@pytest.mark.parametrize(("name", "attention"), BACKENDS)
def test_an_adapter_of_the_language_model_gives_the_tokens_of_peft(
    name: str, attention: str, engines: VisionEngines
) -> None:
    bound = vision_adapter(name, "language", r".*(language_model|text_model).*(q_proj|down_proj)")
    adapted = with_peft(name, bound)
    with_it = [replace(made, adapter=bound) for made in mixed(name)[:3]]
    requests = [*with_it, *mixed(name)[:3]]
    results = engines(name, attention=attention).generate(*requests)
    for made, result in zip(requests, results, strict=True):
        assert_plain(name, made, result, adapted if made.adapter else None)
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
    adapted = with_peft(name, bound)
    first, second = replace(asking(30, image_for(name, 5), 4), adapter=bound), asking(3, image_for(name, 6), 4)
    results = engines(name).generate(first, second)
    assert_plain(name, first, results[0], adapted)
    assert_plain(name, second, results[1])


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_an_adapter_with_a_vocabulary_matrix_of_its_own_is_refused_by_name(
    name: str, engines: VisionEngines, tmp_path: Path
) -> None:
    place = tmp_path / "adapter"
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


QUICK = (("qwen3-vl", "auto"), ("llava", "sdpa"))
EXACT = [
    pytest.param(name, attention, marks=[] if (name, attention) in QUICK else pytest.mark.slow)
    for name, attention in BACKENDS
    if name not in HYBRID | {"gemma3"}
]


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


def test_an_exact_engine_serves_the_text_alone_of_images_that_look_both_ways() -> None:
    exact = EngineConfig(source="unused", exact=True)
    taken = {name for name, config in tiny_vision.CONFIGS.items() if takes_images(config(), exact)}
    assert taken == tiny_vision.CONFIGS.keys() - {"gemma3"}


def test_an_engine_that_serves_the_text_alone_refuses_images() -> None:
    config = EngineConfig(source=str(folder("gemma3")), threads=1, kv_cache_bytes=8 << 20, exact=True)
    with DrivenEngine(config) as engine:
        assert engine.one(asking(17)).error is None
        with pytest.raises(RequestRefused, match="takes no images"):
            engine.one(asking(5, image_for("gemma3", 1)))
