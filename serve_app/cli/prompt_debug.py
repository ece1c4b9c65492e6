"""Shows the tokens of a request without running the service: `python -m serve_app render | tokenize`."""

from collections.abc import Mapping, Sequence

from serve_app.api.prompts.prompt import tokenize
from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.sampling import parse_body
from serve_app.api.validate import validate_chat
from serve_app.base.errors import ConfigRefused
from serve_app.catalog.catalog import ResolvedModel
from serve_app.catalog.served_model import ServedModel, load_model
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.service import ServiceConfig


def render_chat(service: ServiceConfig, model_id: str | None, body: Mapping[str, object]) -> list[tuple[int, str]]:
    """The tokens of a body of POST /chat/completions. Raises the error that the service would answer with."""
    model = load_model(_chosen(service, model_id))
    target = ResolvedModel(model.id, model, model.context_length, model.renderer)
    request = validate_chat(parse_body(ChatBody, {**body, "model": model.id}), target, service.limits)
    return _spelled(model, request.renderer.render(request.conversation).token_ids)


def tokenize_text(service: ServiceConfig, model_id: str | None, text: str) -> list[tuple[int, str]]:
    """The tokens of a `prompt` of POST /completions."""
    model = load_model(_chosen(service, model_id))
    return _spelled(model, tokenize(text, model).token_ids)


def _chosen(service: ServiceConfig, model_id: str | None) -> ModelConfig:
    found = next((model for model in service.models if model_id in (None, model.id)), None)
    if found is None:
        known = ", ".join(model.id for model in service.models)
        raise ConfigRefused(f"The configuration has no model {model_id!r}, only {known}.")
    return found


def _spelled(model: ServedModel, token_ids: Sequence[int]) -> list[tuple[int, str]]:
    return [(token_id, model.tokenizer.decode([token_id])) for token_id in token_ids]
