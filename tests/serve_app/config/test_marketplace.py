"""The slugs in the configuration: what is refused, alone and by name."""

from typing import Any

import pytest

from serve_app.config.checking.refusal import Refusal
from serve_app.config.marketplace import MarketplaceConfig
from serve_app.config.service import ServiceConfig, parse_config, read_config

MODEL = {"id": "a/b", "app": "a", "source": "/models/a"}
PRICE = {"prompt": 0.1, "completion": 0.4}
UPSTREAM = {"url": "https://api.example.com/v1", "model": "theirs"}
HERE = {"name": "here", "model": "a/b", "price": PRICE}
FAR = {"name": "far", "upstream": UPSTREAM, "price": PRICE}
SLUG = {"id": "acme/tri", "endpoints": [HERE, FAR]}


def with_slugs(*slugs: Any) -> dict[str, Any]:
    return {"models": [MODEL], "marketplace": {"slugs": list(slugs)}}


def refusals(raw: object, before: ServiceConfig | None = None) -> tuple[Refusal, ...]:
    return read_config(raw, before).refusals


def slug_ids(config: ServiceConfig) -> list[str]:
    return [slug.id for slug in config.marketplace.slugs]


def test_a_slug_has_the_documented_defaults() -> None:
    (slug,) = parse_config(with_slugs(SLUG)).marketplace.slugs
    here, far = slug.endpoints
    assert (slug.allow_whole, slug.owned_by) == (False, "roundhouse")
    assert (here.model, here.upstream, here.weight) == ("a/b", None, 1)
    assert far.upstream is not None
    assert (far.upstream.key, far.upstream.allow_private) == (None, False)
    assert (far.upstream.takes.prompt_cache_key, far.upstream.takes.stream_usage) == (False, True)
    assert parse_config({"models": [MODEL]}).marketplace == MarketplaceConfig()


def test_a_gateway_needs_no_model_of_its_own() -> None:
    slug = {**SLUG, "endpoints": [FAR]}
    for models in ({}, {"models": []}, {"models": None}):
        assert slug_ids(parse_config({**models, "marketplace": {"slugs": [slug]}})) == ["acme/tri"]


def changed(endpoint: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**SLUG, "endpoints": [{**endpoint, **fields}]}


def upstream(**fields: Any) -> dict[str, Any]:
    return changed(FAR, upstream={**UPSTREAM, **fields})


URL = "must be an http or https URL of at most 2048 characters without user, query and fragment"


@pytest.mark.parametrize(
    ("slug", "path", "rest"),
    [
        ({**SLUG, "id": "a:b"}, ".id", 'must be a name without ":", ";", "/ep/" or spaces, got "a:b".'),
        ({**SLUG, "id": "a/b"}, ".id", 'must be unique among slugs and models, got "a/b".'),
        ({**SLUG, "endpoints": []}, ".endpoints", "must not be empty, got a list of 0."),
        ({**SLUG, "endpoint": []}, ".endpoint", "is not a known key. Did you mean 'endpoints'?"),
        ({**SLUG, "endpoints": [HERE, HERE]}, ".endpoints[1].name", 'must be unique, got "here".'),
        (changed(HERE, name="a b"), ".endpoints[0].name", 'must match ^[A-Za-z0-9._-]{1,64}$, got "a b".'),
        (changed(HERE, name="a\n"), ".endpoints[0].name", 'must match ^[A-Za-z0-9._-]{1,64}$, got "a\\n".'),
        (changed(HERE, price=None), ".endpoints[0].price", "must be an object, got null."),
        (changed(HERE, weight=0), ".endpoints[0].weight", "must be greater than 0, got 0."),
        (changed(HERE, model="c/d"), ".endpoints[0].model", 'must name a model of this file, got "c/d".'),
        (
            changed(HERE, model="acme/tri"),
            ".endpoints[0].model",
            'must name a model of this file, got "acme/tri".',
        ),
        (
            changed(HERE, upstream=UPSTREAM),
            ".endpoints[0]",
            "must have exactly one of model and upstream, got a list of 2.",
        ),
        (changed(FAR, owner="me"), ".endpoints[0].owner", 'is for local models only, got "me".'),
        (upstream(url="ftp://x"), ".endpoints[0].upstream.url", f"{URL}, got a string of 7 characters."),
        (upstream(url="http://"), ".endpoints[0].upstream.url", f"{URL}, got a string of 7 characters."),
        (upstream(url="https://u:p@x/v1"), ".endpoints[0].upstream.url", f"{URL}, got a string of 16 characters."),
        (upstream(url="https://x/v1?a=1"), ".endpoints[0].upstream.url", f"{URL}, got a string of 16 characters."),
        (upstream(url="https://x/v1#a"), ".endpoints[0].upstream.url", f"{URL}, got a string of 14 characters."),
        (upstream(url="https://x:99999"), ".endpoints[0].upstream.url", f"{URL}, got a string of 15 characters."),
        (
            upstream(url="http://127.1/v1"),
            ".endpoints[0].upstream.url",
            "must be at a public address unless allow_private is true, got a string of 15 characters.",
        ),
        (
            upstream(key="sk-the-key-itself"),
            ".endpoints[0].upstream.key",
            "must be an object, got a string of 17 characters.",
        ),
        (
            upstream(key={}),
            ".endpoints[0].upstream.key",
            "must have exactly one of env and file, got a list of 0.",
        ),
        (upstream(takes={"x": True}), ".endpoints[0].upstream.takes.x", None),
        (
            upstream(first_byte_timeout_s=0),
            ".endpoints[0].upstream.first_byte_timeout_s",
            "must be greater than 0, got 0.",
        ),
    ],
    ids=str,
)
def test_a_bad_slug_is_refused_alone_and_keeps_its_previous_value(slug: Any, path: str, rest: str | None) -> None:
    good = {**SLUG, "id": "acme/good"}
    before = parse_config(with_slugs({**SLUG, "owned_by": "before"}))
    reading = read_config(with_slugs(good, slug), before)
    (refusal,) = reading.refusals
    assert (refusal.path, refusal.section) == (f"marketplace.slugs[1]{path}", "marketplace")
    assert rest is None or str(refusal) == f"marketplace.slugs[1]{path} {rest}"
    kept = [each.owned_by for each in reading.config.marketplace.slugs if each.id == "acme/tri"]
    assert slug_ids(reading.config) == ["acme/good", *(["acme/tri"] if slug["id"] == "acme/tri" else [])]
    assert kept == (["before"] if slug["id"] == "acme/tri" else [])


@pytest.mark.parametrize("model", ["a/b:x", "tinker://run/sampler_weights/a", "a/b;tinker://run/sampler_weights/a"])
def test_a_local_endpoint_is_what_clients_may_write(model: str) -> None:
    assert not refusals(with_slugs(changed(HERE, model=model)))


def test_a_local_endpoint_with_a_malformed_checkpoint_is_refused() -> None:
    (refusal,) = refusals(with_slugs(changed(HERE, model="tinker://run/a")))
    assert refusal.path == "marketplace.slugs[0].endpoints[0].model"


def test_a_private_address_is_allowed_where_it_is_said() -> None:
    assert not refusals(with_slugs(upstream(url="http://10.0.0.7:8000/v1", allow_private=True)))


def test_a_slug_that_is_not_listed_any_more_is_gone() -> None:
    before = parse_config(with_slugs(SLUG))
    assert slug_ids(read_config({"models": [MODEL]}, before).config) == []


def test_a_model_takes_a_name_from_a_slug() -> None:
    before = parse_config(with_slugs(SLUG))
    reading = read_config({"models": [MODEL, {**MODEL, "id": "acme/tri"}], "marketplace": {"slugs": [SLUG]}}, before)
    assert [str(refusal) for refusal in reading.refusals] == [
        'marketplace.slugs[0].id must be unique among slugs and models, got "acme/tri".'
    ]
    assert slug_ids(reading.config) == []


def test_a_slug_may_take_the_name_of_a_model_that_is_gone() -> None:
    before = parse_config({"models": [MODEL, {**MODEL, "id": "acme/tri"}]})
    assert slug_ids(read_config(with_slugs(SLUG), before).config) == ["acme/tri"]


def test_of_two_slugs_of_one_id_the_first_counts() -> None:
    reading = read_config(with_slugs({**SLUG, "owned_by": "first"}, SLUG))
    assert [slug.owned_by for slug in reading.config.marketplace.slugs] == ["first"]
    assert [refusal.path for refusal in reading.refusals] == ["marketplace.slugs[1].id"]


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (None, "marketplace must be an object, got null."),
        ([], "marketplace must be an object, got a list of 0."),
        ({"slug": []}, "marketplace.slug is not a known key. Did you mean 'slugs'?"),
        ({"slugs": {}}, "marketplace.slugs must be a list, got an object."),
    ],
)
def test_a_section_that_cannot_be_read_stays_as_it_was(raw: object, sentence: str) -> None:
    reading = read_config({"models": [MODEL], "marketplace": raw}, parse_config(with_slugs(SLUG)))
    assert [str(refusal) for refusal in reading.refusals] == [sentence]
    assert slug_ids(reading.config) == ["acme/tri"]


def test_a_misspelt_section_leaves_the_slugs_as_they_were() -> None:
    reading = read_config({"models": [MODEL], "market": {}}, parse_config(with_slugs(SLUG)))
    assert slug_ids(reading.config) == ["acme/tri"]


def test_a_key_may_name_slugs() -> None:
    key = {"name": "k", "env": "A", "models": ["acme/tri", "a/b", "other"]}
    assert [str(refusal) for refusal in refusals({**with_slugs(SLUG), "keys": [key]})] == [
        'keys[0].models[2] must be the id of a model or slug, got "other".'
    ]
