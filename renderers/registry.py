"""The families by name, and which one a model is of."""

from importlib import import_module
from typing import overload

from renderers import qwen3
from renderers.base import Renderer
from renderers.jinja import ChatTemplate
from renderers.markers import Tokenizer

RENDERERS = {
    "generic": "renderers.generic:GenericRenderer",
    "qwen3": "renderers.qwen3:Qwen3Renderer",
    "qwen3_text": "renderers.qwen3:Qwen3TextRenderer",
    "role_colon": "renderers.role_colon:RoleColonRenderer",
}

_RECOGNISERS = {"qwen3": qwen3.recognises}
"""In this order; a model that none of them recognises is served by the generic renderer."""


@overload
def build(name: str, tokenizer: Tokenizer, chat_template: str | None) -> Renderer: ...


@overload
def build(name: str | None, tokenizer: Tokenizer, chat_template: str) -> Renderer: ...


@overload
def build(name: str | None, tokenizer: Tokenizer, chat_template: str | None) -> Renderer | None: ...


def build(name: str | None, tokenizer: Tokenizer, chat_template: str | None) -> Renderer | None:
    """The renderer with this name, or the one found from vocabulary and template; None if there is no template then.

    `chat_template` replaces the tokenizer's own. Takes 10 to 200 ms. Raises `ValueError` for an unknown name and
    `TemplateRefused` for a template that cannot be served, or not by this renderer.
    """
    source = chat_template if chat_template is not None else tokenizer.chat_template
    if name is None and source is None:
        return None
    if name is not None and name not in RENDERERS:
        raise ValueError(f"renderer must be one of {', '.join(RENDERERS)}, got {name!r}.")
    template = ChatTemplate(tokenizer, source) if source is not None and name != "role_colon" else None
    if name is None:
        assert template is not None
        name = next((family for family, fits in _RECOGNISERS.items() if fits(template)), "generic")
    module, _, attribute = RENDERERS[name].partition(":")
    renderer: Renderer = getattr(import_module(module), attribute)(tokenizer, template)
    return renderer
