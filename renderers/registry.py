"""The families by name, and how to find a model's family."""

from importlib import import_module
from typing import overload

from renderers.base import Renderer
from renderers.families import (
    deepseek_v3,
    deepseek_v4,
    deepseek_v4_1,
    kimi_k2,
    kimi_k3,
    nemotron3,
    qwen2_5,
    qwen3,
    qwen3_5,
)
from renderers.markers import Tokenizer, added_tokens
from renderers.templates.chat_template import ChatTemplate

RENDERERS = {
    "deepseek_v3": "renderers.families.deepseek_v3:DeepSeekV3Renderer",
    "deepseek_v4": "renderers.families.deepseek_v4:DeepSeekV4Renderer",
    "deepseek_v4_1": "renderers.families.deepseek_v4_1:DeepSeekV41Renderer",
    "generic": "renderers.families.generic:GenericRenderer",
    "kimi_k2": "renderers.families.kimi_k2:KimiK2Renderer",
    "kimi_k3": "renderers.families.kimi_k3:KimiK3Renderer",
    "nemotron3": "renderers.families.nemotron3:build",
    "qwen2_5": "renderers.families.qwen2_5:build",
    "qwen3": "renderers.families.qwen3:build",
    "qwen3_5": "renderers.families.qwen3_5:build",
    "qwen3_text": "renderers.families.qwen3:build_text",
    "role_colon": "renderers.families.role_colon:RoleColonRenderer",
}

_RECOGNISERS = {
    "qwen3": qwen3.recognises,
    "qwen2_5": qwen2_5.recognises,
    "nemotron3": nemotron3.recognises,
    "qwen3_5": qwen3_5.recognises,
    "kimi_k2": kimi_k2.recognises,
    "kimi_k3": kimi_k3.recognises,
    "deepseek_v4": deepseek_v4.recognises,
    "deepseek_v3": deepseek_v3.recognises,
}
"""Tried in this order. The generic renderer serves a model that none of them recognises."""

_WITHOUT_TEMPLATE = {"deepseek_v4_1": deepseek_v4_1.recognises}
"""Families whose models have no template: found from the vocabulary."""


@overload
def build(name: str, tokenizer: Tokenizer, chat_template: str | None, *, max_tokens: int | None = None) -> Renderer: ...


@overload
def build(name: str | None, tokenizer: Tokenizer, chat_template: str, *, max_tokens: int | None = None) -> Renderer: ...


@overload
def build(
    name: str | None, tokenizer: Tokenizer, chat_template: str | None, *, max_tokens: int | None = None
) -> Renderer | None: ...


def build(
    name: str | None, tokenizer: Tokenizer, chat_template: str | None, *, max_tokens: int | None = None
) -> Renderer | None:
    """The renderer with this name, or the one found from vocabulary and template. None if none was named, there is no
    template, and the vocabulary is of no family that needs none.

    `chat_template` replaces the tokenizer's own; `max_tokens` as in `ChatTemplate`. Takes 10 to 200 ms. Raises
    `ValueError` for an unknown name. Raises `TemplateRefused` for a template that cannot be served, or not by this
    renderer.
    """
    source = chat_template if chat_template is not None else tokenizer.chat_template
    if name is None and source is None:
        added = added_tokens(tokenizer.backend_tokenizer)
        name = next((family for family, fits in _WITHOUT_TEMPLATE.items() if fits(added)), None)
        if name is None:
            return None
    if name is not None and name not in RENDERERS:
        raise ValueError(f"renderer must be one of {', '.join(RENDERERS)}, got {name!r}.")
    template = None
    if source is not None and name not in ("role_colon", *_WITHOUT_TEMPLATE):
        template = ChatTemplate(tokenizer, source, max_tokens=max_tokens)
    if name is None:
        assert template is not None
        name = next((family for family, fits in _RECOGNISERS.items() if fits(template)), "generic")
    module, _, attribute = RENDERERS[name].partition(":")
    renderer: Renderer = getattr(import_module(module), attribute)(tokenizer, template)
    return renderer
