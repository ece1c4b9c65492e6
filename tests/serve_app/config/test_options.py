"""The page of options is what the types say, and the types are what is checked."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le

from engines.interface.config import EngineConfig, limits_of
from serve_app.base.errors import ConfigRefused
from serve_app.cli.commands import main
from serve_app.config.api import ApiArgs, parse_api_args
from serve_app.config.checking.option import REQUIRED, Option, options_of
from serve_app.config.checking.refusal import RENAMED
from serve_app.config.images import ImageArgs, parse_image_args
from serve_app.config.model import ModelArgs, parse_model_args
from serve_app.config.options_page import PAGE
from serve_app.config.service import ServiceConfig, parse_config

PRICE = {"prompt": 1, "completion": 2}
MODEL = {"id": "a/b", "app": "a", "source": "/models/a", "price": PRICE}
UPSTREAM = {"url": "https://example.com/v1", "model": "m", "key": {"env": "A"}}
ENDPOINT = {"name": "far", "upstream": UPSTREAM, "price": {**PRICE}}  # not the same object: they are changed in place
SLUG = {"id": "a/slug", "endpoints": [ENDPOINT]}
KEY = {"name": "k", "env": "A"}
ROOTS: dict[str, tuple[type, Any, Any]] = {
    "user_config": (
        ServiceConfig,
        parse_config,
        {"models": [MODEL], "images": {"app": "i"}, "keys": [KEY], "marketplace": {"slugs": [SLUG]}, "ledger": {}},
    ),
    "api": (ApiArgs, parse_api_args, {"tracing": {"endpoint": "http://127.0.0.1:4318/v1/traces"}}),
    "images": (ImageArgs, parse_image_args, {}),
    "model": (ModelArgs, parse_model_args, {"id": "m", "source": "owner/model"}),
}


def walk(section: type, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Option]]:
    for option in options_of(section):
        place = (*at, option.name)
        yield place, option
        if option.section is not None:
            yield from walk(option.section, (*place, 0) if "tuple[" in str(option.hint) else place)


ALL = [(root, place, option) for root, (section, *_) in ROOTS.items() for place, option in walk(section)]
LIMITED = [
    (root, place, option, limit)
    for root, place, option in ALL
    if option.section is None
    for limit in limits_of(option.hint)
    if isinstance(limit, Ge | Gt | Le) and place[-1] != "variants"
]


def set_at(raw: Any, place: tuple[str | int, ...], value: object) -> Any:
    raw = copy.deepcopy(raw)
    inner = raw
    for name in place[:-1]:
        inner = inner.setdefault(name, {}) if isinstance(name, str) else inner[name]
    inner[place[-1]] = value
    return raw


def test_the_page_is_what_the_command_prints(capsys) -> None:
    assert main(["options"]) == 0
    assert PAGE.read_text() == capsys.readouterr().out


@pytest.mark.parametrize(("root", "place", "option"), ALL, ids=lambda value: str(value)[:60])
def test_every_option_has_a_sentence(root: str, place: tuple[str | int, ...], option: Option) -> None:
    for sentence in re.split(r"(?<=[.;:]) ", option.sentence):
        assert 0 < len(sentence.split()) <= 30
    assert option.sentence.endswith((".", "…"))


@pytest.mark.parametrize(("root", "place", "option", "limit"), LIMITED, ids=lambda value: str(value)[:60])
def test_every_range_on_the_page_is_the_one_that_is_checked(root, place, option, limit) -> None:
    _, parse, raw = ROOTS[root]
    is_float = "float" in str(option.hint)
    step = 0.5 if is_float else 16 if place[-1] == "block_size" else 1
    beyond = {Ge: lambda: limit.ge - step, Gt: lambda: limit.gt, Le: lambda: limit.le + step}[type(limit)]()
    bound = {Ge: lambda: limit.ge, Gt: lambda: limit.gt, Le: lambda: limit.le}[type(limit)]()
    words = {Ge: "at least", Gt: "greater than", Le: "at most"}[type(limit)]
    with pytest.raises(ConfigRefused) as refused:
        parse(set_at(raw, place, beyond))
    shown = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in place).removeprefix(".")
    assert str(refused.value) == f"{shown} must be {words} {bound}, got {json.dumps(beyond)}."


@pytest.mark.parametrize(("root", "place", "option"), ALL, ids=lambda value: str(value)[:60])
def test_every_default_on_the_page_is_one_that_may_be_written(root, place, option) -> None:
    _, parse, raw = ROOTS[root]
    if option.default is REQUIRED or option.section is not None or place[-1] in ("sha256", "env", "file"):
        return
    assert parse(set_at(raw, place, option.default)) == parse(raw)


def test_the_options_of_the_engine_are_those_of_its_configuration() -> None:
    args = parse_model_args({"id": "m", "source": "owner/model", "kernel_cache": "/kernels"})
    assert args.engine_config() == EngineConfig("owner/model", kernel_cache="/kernels", device="cpu")


def test_what_was_renamed_leads_to_an_option_that_is_there() -> None:
    paths = {".".join(name for name in place if isinstance(name, str)) for _, place, _ in ALL}
    for old, new in RENAMED.items():
        assert old not in paths
        assert f"{old.rpartition('.')[0]}.{new}".removeprefix(".") in paths
