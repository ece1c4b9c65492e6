"""The context window: the only place that checks a prompt against it, before and after tokenisation."""

from collections.abc import Sequence

from renderers.templates.prompt_length import tokens_beyond
from serve_app.api.requests import ChatRequest
from serve_app.base.errors import InvalidRequest
from serve_app.base.explain import show
from serve_app.catalog.served_model import ServedModel

THE_MODELS_WINDOW = "the model's context window"
LONGEST_WINDOW = "the longest context window here"
_UNSURE_CHARACTERS_PER_TOKEN = 16
_UNSURE_CHARACTERS = 1 << 16


def check_context(field: str, num_prompt: int, max_tokens: int | None, context_length: int) -> int:
    """How many tokens the reply may have; `max_tokens` None: as many as fit. Raises `InvalidRequest`."""
    if num_prompt > context_length or (num_prompt == context_length and max_tokens != 0):
        raise too_long(field, context_length, str(num_prompt))
    if max_tokens is None:
        return context_length - num_prompt
    if num_prompt + max_tokens > context_length:
        raise InvalidRequest(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{num_prompt} + {show(max_tokens)} > {context_length}",
            "max_tokens",
            "context_length_exceeded",
        )
    return max_tokens


def check_prompt_length(prompt: str, model: ServedModel, context_length: int) -> None:
    """Raises `InvalidRequest` if the prompt is certainly too long; the exact check comes once it is tokenised."""
    _check("prompt", [prompt], model, context_length)


def check_conversation_length(request: ChatRequest, model: ServedModel, context_length: int) -> None:
    """The same for a conversation. A template writes the text of all messages. It may drop reasoning, calls and tools,
    so these get a looser bound. Raises `InvalidRequest`.
    """
    messages = request.conversation.messages
    _check("messages", [message.text for message in messages], model, context_length)
    unsure = request.tools_characters
    for message in messages:
        unsure += len(message.reasoning or "") + sum(len(call.arguments) for call in message.tool_calls)
    limit = most_unsure_characters(context_length)
    if unsure > limit:
        raise InvalidRequest(
            f"messages and tools must have at most {limit} characters of reasoning, arguments and declarations, "
            f"got {unsure}.",
            "messages",
            "context_length_exceeded",
        )


def most_unsure_characters(context_length: int) -> int:
    """The most characters of reasoning, arguments and declarations together that can fit, even if a template keeps all
    of them.
    """
    return _UNSURE_CHARACTERS + _UNSURE_CHARACTERS_PER_TOKEN * context_length


def too_long(field: str, limit: int, given: str, *, window: str = THE_MODELS_WINDOW) -> InvalidRequest:
    """The error for a prompt that leaves no room for a reply. `given`: its number of tokens, in words."""
    return InvalidRequest(
        f"{field} must have fewer tokens than {window} of {limit}, got {given}.", field, "context_length_exceeded"
    )


def at_least(count: int) -> str:
    """`given` for a prompt whose counting stopped once it was certainly too long."""
    return f"at least {count} (counting stopped there)"


def _check(field: str, texts: Sequence[str], model: ServedModel, context_length: int) -> None:
    if sum(map(len, texts)) <= context_length:  # the exact check costs no more than this one
        return
    count = tokens_beyond(context_length, texts, model.tokenizer.backend_tokenizer)
    if count is not None:
        raise too_long(field, context_length, at_least(count))
