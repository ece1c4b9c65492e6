"""Whether a long text can fit into a context window, found out at a cost that the window bounds.

Tokenising takes about a microsecond and 300 bytes per character: a body of megabytes must not be tokenised as a whole
only to find that it is too long.
"""

from collections.abc import Sequence

from serve_app.errors import InvalidRequest
from serve_app.served_model import ServedModel
from serve_app.validate import ChatRequest

_SLICE_CHARACTERS = (1 << 11, 1 << 16)
_BORDER_TOKENS = 16  # by so many the tokens of a slice may differ from those it has within the whole
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
    backend = model.tokenizer.backend_tokenizer
    least, most = _SLICE_CHARACTERS
    slice_len = min(max(least, context_length), most)
    count = 0
    for text in texts:
        for start in range(0, len(text), slice_len):
            piece = text[start : start + slice_len]
            # Without special tokens, and quicker than `encode` since nobody asks where each token begins.
            (encoding,) = backend.encode_batch_fast([piece], add_special_tokens=False)
            count += max(0, len(encoding) - _BORDER_TOKENS)
            if count > context_length:
                raise InvalidRequest(
                    f"{field} must have fewer tokens than the model's context window of {context_length}, "
                    f"got more than {count}.",
                    field,
                    "context_length_exceeded",
                )
