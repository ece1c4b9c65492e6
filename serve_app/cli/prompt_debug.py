"""Shows the tokens of a request without running the service: `python -m serve_app render | tokenize`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from serve_app.api.prompt import tokenize
from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.sampling import parse_body
from serve_app.api.validate import validate_chat
from serve_app.catalog.catalog import ResolvedModel
from serve_app.catalog.served_model import ServedModel, load_model
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.service import ServiceConfig
from serve_app.errors import ConfigRefused

_MARKER, _ODD, _PLAIN = "\x1b[1;35m", "\x1b[7m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Token:
    """`text`: what it adds to the prompt; empty while a character is unfinished. `spelling`: the token by itself."""

    token_id: int
    text: str
    spelling: str
    is_marker: bool


def render_chat(service: ServiceConfig, model_id: str, body: object) -> list[Token]:
    """The tokens of a body of POST /chat/completions, or of its `messages`. Raises the error that the service would
    answer with.
    """
    model = load_model(_chosen(service, model_id))
    target = ResolvedModel(model.id, model, model.context_length, model.renderer)
    fields = {"messages": body} if isinstance(body, list) else body
    if not isinstance(fields, Mapping):
        raise ConfigRefused("The input must be a list of messages or the body of a chat request.")
    request = validate_chat(parse_body(ChatBody, {**fields, "model": model.id}), target, service.limits)
    return _tokens(model, request.renderer.render(request.conversation).token_ids)


def tokenize_text(service: ServiceConfig, model_id: str | None, text: str) -> list[Token]:
    """The tokens of a `prompt` of POST /completions."""
    model = load_model(_chosen(service, model_id))
    return _tokens(model, tokenize(text, model).token_ids)


def lines_of(tokens: Sequence[Token], *, in_colour: bool) -> Iterator[str]:
    """The text as a whole, then each token with its id. Markers are in colour; of the others in the text, every second
    one is inverted, which shows where they end.
    """
    begin_marker, begin_odd, end = (_MARKER, _ODD, _PLAIN) if in_colour else ("", "", "")
    beginnings = [begin_marker if token.is_marker else begin_odd * (index % 2) for index, token in enumerate(tokens)]
    text = "".join(_coloured(token.text, beginning, end) for token, beginning in zip(tokens, beginnings, strict=True))
    yield from text.split("\n")
    for token in tokens:
        beginning = begin_marker if token.is_marker else ""
        yield f"{token.token_id:>8} {_coloured(repr(token.spelling), beginning, end)}"
    yield f"{len(tokens)} tokens, of which special: {sum(token.is_marker for token in tokens)}"


def _coloured(text: str, beginning: str, end: str) -> str:
    """Line by line, so that no colour runs to the edge of the terminal. Control characters are spelled out."""
    lines = ["".join(char if char.isprintable() else repr(char)[1:-1] for char in line) for line in text.split("\n")]
    return "\n".join(f"{beginning}{line}{end}" if line and beginning else line for line in lines)


def _chosen(service: ServiceConfig, model_id: str | None) -> ModelConfig:
    found = next((model for model in service.models if model_id in (None, model.id)), None)
    if found is None:
        known = ", ".join(model.id for model in service.models)
        raise ConfigRefused(f"The configuration has no model {model_id!r}, only {known}.")
    return found


def _tokens(model: ServedModel, token_ids: Sequence[int]) -> list[Token]:
    detokenizer = model.table.detokenizer()
    markers = model.table.added.markers
    return [
        Token(
            token_id,
            "".join(piece.text for piece in detokenizer.feed([token_id])),
            model.table.token_text(token_id),
            token_id in markers,
        )
        for token_id in token_ids
    ]
