"""Whatever a configuration holds, what is good of it is read, and the rest is said."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_app.config.checking.refusal import SECTIONS
from serve_app.config.service import ServiceConfig, read_config

GOOD_MODEL = {"id": "a/b", "app": "a", "source": "/models/a"}
GOOD_KEY = {"name": "k", "sha256": "0" * 64}
BEFORE = read_config(
    {
        "models": [{**GOOD_MODEL, "id": "old"}],
        "keys": [{**GOOD_KEY, "name": "old"}],
        "limits": {"messages": 7},
        "checkpoints": {"roots": ["/old"]},
        "images": {"app": "old"},
    }
).config
NAMES = ["id", "app", "source", "name", "sha256", "limits", "models", "keys", "roots", "messages", "also_known_as"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.sampled_from(NAMES), inner),
    max_leaves=8,
)


def test_the_one_before_is_as_it_is_meant() -> None:
    assert [model.id for model in BEFORE.models] == ["old"]
    assert (BEFORE.limits.messages, BEFORE.checkpoints.roots) == (7, ("/old",))


@given(st.sampled_from([None, BEFORE]), st.dictionaries(st.sampled_from([*SECTIONS, "zzz"]), JSON) | JSON)
def test_nothing_stops_it_and_all_that_is_refused_is_said(before: ServiceConfig | None, raw: Any) -> None:
    reading = read_config(raw, before)
    for refusal in reading.refusals:
        assert refusal.sentence.endswith((".", "?"))
        assert refusal.section in SECTIONS
    if not reading.refusals:
        assert read_config(raw).config == reading.config  # nothing of the one before is left


@given(st.lists(JSON, max_size=3), st.lists(JSON, max_size=3), JSON)
def test_a_good_model_and_a_good_key_are_read_beside_anything(models: list[Any], keys: list[Any], limits: Any) -> None:
    raw = {"models": [GOOD_MODEL, *models], "keys": [GOOD_KEY, *keys], "limits": limits, "checkpoints": limits}
    config = read_config(raw, BEFORE).config
    assert config.models[0].id == "a/b"
    assert config.keys[0].name == "k"
    assert "old" not in [key.name for key in config.keys]
    if not isinstance(limits, dict):
        assert config.limits == BEFORE.limits
        assert config.checkpoints == BEFORE.checkpoints
