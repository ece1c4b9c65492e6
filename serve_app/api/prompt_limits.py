"""Whether a prompt can fit into the context window, before it is tokenised as a whole."""

from collections.abc import Sequence

from renderers.templates.prompt_length import tokens_beyond
from serve_app.api.validate import ChatRequest
from serve_app.catalog.served_model import ServedModel
from serve_app.errors import InvalidRequest

_UNSURE_CHARACTERS_PER_TOKEN = 16
_UNSURE_CHARACTERS = 1 << 16


def check_prompt_length(prompt: str, model: ServedModel, context_length: int) -> None:
    """Raises `InvalidRequest` if the prompt is certainly too long; the exact check comes once it is tokenised."""
    _check("prompt", [prompt], model, context_length)


def check_conversation_length(request: ChatRequest, model: ServedModel, context_length: int) -> None:
    """The same for a conversation. A template writes all the text of the messages out. It may drop reasoning, calls and
    tools, so these are judged by a measure that is too large for any that it keeps. Raises `InvalidRequest`.
    """
    messages = request.conversation.messages
    _check("messages", [message.text for message in messages], model, context_length)
    unsure = request.tools_characters
    for message in messages:
        unsure += len(message.reasoning or "") + sum(len(call.arguments) for call in message.tool_calls)
    limit = _UNSURE_CHARACTERS + _UNSURE_CHARACTERS_PER_TOKEN * context_length
    if unsure > limit:
        raise InvalidRequest(
            f"messages and tools must have at most {limit} characters of reasoning, arguments and declarations, "
            f"got {unsure}.",
            "messages",
            "context_length_exceeded",
        )


def _check(field: str, texts: Sequence[str], model: ServedModel, context_length: int) -> None:
    if sum(map(len, texts)) <= context_length:  # the exact check costs no more than this one
        return
    count = tokens_beyond(context_length, texts, model.tokenizer.backend_tokenizer)
    if count is not None:
        raise InvalidRequest(
            f"{field} must have fewer tokens than the model's context window of {context_length}, "
            f"got more than {count}.",
            field,
            "context_length_exceeded",
        )
