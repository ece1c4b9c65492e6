"""The slugs of a configuration, and what survives a change of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import ModelNotFound
from serve_app.config.marketplace import MarketplaceConfig
from serve_app.marketplace.health import HealthState
from serve_app.marketplace.slugs import Endpoint, Marketplace, Wanted

PRICE = {"prompt": 1, "completion": 2}
HERE = {"name": "here", "model": "a/b", "price": PRICE}


def far(**upstream: Any) -> dict[str, Any]:
    return {"name": "far", "upstream": {"url": "https://example.com/v1", "model": "m", **upstream}, "price": PRICE}


def marketplace(*endpoints: dict[str, Any], before: Marketplace | None = None, slug: str = "acme/tri") -> Marketplace:
    raw = {"slugs": [{"id": slug, "endpoints": list(endpoints)}]}
    return Marketplace.of(MarketplaceConfig.model_validate(raw), before)


def endpoints(found: Marketplace) -> dict[str, Endpoint]:
    return {endpoint.name: endpoint for endpoint in found.slugs["acme/tri"].endpoints}


def found(requested: str) -> Wanted | None:
    return marketplace(HERE, far()).find(requested)


def test_a_slug_and_its_endpoints_are_found() -> None:
    wanted, pinned = found("acme/tri"), found("acme/tri/ep/far")
    assert wanted is not None
    assert (wanted.slug.id, wanted.pinned) == ("acme/tri", None)
    assert pinned is not None
    assert pinned.pinned is not None
    assert pinned.pinned.name == "far"


@pytest.mark.parametrize("requested", ["", "acme", "acme/tri/", "acme/tri/ep", "other/ep/far", "x/ep/acme/tri"])
def test_what_is_no_slug(requested: str) -> None:
    assert found(requested) is None


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        ("acme/tri/ep/farr", "The model 'acme/tri' has no endpoint 'farr'. Did you mean 'far'?"),
        ("acme/tri/ep/", "The model 'acme/tri' has no endpoint ''."),
    ],
)
def test_an_unknown_endpoint_is_said(requested: str, sentence: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        found(requested)
    assert str(caught.value) == sentence
    assert caught.value.param == "model"
    assert marketplace(HERE).slug_of(requested) is not None  # whether the caller may use it is asked first


def test_health_measurements_and_connections_survive_a_change_of_something_else() -> None:
    before = marketplace(HERE, far())
    for endpoint in endpoints(before).values():
        attempt = endpoint.health.begin("mine")
        assert attempt is not None
        attempt.failed()
        endpoint.recent.saw_first_token(1.5)
    dearer = {**far(), "price": {**PRICE, "prompt": 9}, "weight": 2.0}
    after = endpoints(marketplace(dearer, {**HERE, "name": "new"}, HERE, before=before))
    assert after["far"].price.prompt == 9
    assert after["far"].upstream is endpoints(before)["far"].upstream
    for name in ("far", "here"):
        assert (after[name].health.state_for("mine"), after[name].recent.first_token_s) == (HealthState.COOLING, 1.5)
    assert (after["new"].health.state_for("mine"), after["new"].recent.first_token_s) == (HealthState.UP, None)


@pytest.mark.parametrize("change", [{"url": "https://other.example/v1"}, {"model": "n"}, {"idle_timeout_s": 5.0}])
def test_an_endpoint_that_is_somewhere_else_starts_anew(change: dict[str, Any]) -> None:
    before = marketplace(far())
    after = marketplace(far(**change), before=before)
    assert endpoints(after)["far"].health is not endpoints(before)["far"].health


def test_a_new_key_in_the_same_file_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-first-key\n")
    before = marketplace(far(key={"file": str(file)}))
    file.write_text("sk-second-key\n")
    after = endpoints(marketplace(far(key={"file": str(file)}), before=before))["far"].upstream
    assert after is not None
    assert after.key == "sk-second-key"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read from"),
        ("", "is empty in"),
        ("short", "must have 8 to 4096 printable ASCII characters, got 5"),
        ("sk-two\nlines", "must have 8 to 4096 printable ASCII characters, got 12"),
    ],
)
def test_a_slug_whose_key_cannot_be_read_stays_as_it_was(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    before = marketplace(HERE)
    after = marketplace(far(key={"file": str(file)}), before=before)
    assert after.slugs == before.slugs
    (refusal,) = after.refusals
    assert refusal.path == "marketplace.slugs[0]"
    assert str(refusal).startswith("The key of the endpoint 'acme/tri/ep/far' ")
    assert reason in str(refusal)
    assert not content or content not in str(refusal)


def test_a_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_UPSTREAM_KEY", "sk-of-the-environment")
    upstream = endpoints(marketplace(far(key={"env": "TEST_UPSTREAM_KEY"})))["far"].upstream
    assert upstream is not None
    assert upstream.key == "sk-of-the-environment"


def test_what_goes_away_is_closed_and_what_stays_is_not() -> None:
    before = marketplace(HERE, far())
    after = marketplace(far(), before=before)
    assert before.upstreams() == after.upstreams()
    asyncio.run(before.close(after))
    asyncio.run(after.close())
