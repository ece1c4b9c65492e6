"""The parts of response bodies that both endpoints, or streams and whole replies, share."""

from typing import TypedDict


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class UsageReply(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class FunctionReply(TypedDict):
    name: str
    arguments: str


class ToolCallReply(TypedDict):
    id: str
    type: str
    function: FunctionReply


class ChatMessage(TypedDict):
    """Every field is there, null when empty."""

    role: str
    content: str | None
    reasoning_content: str | None
    name: None
    tool_calls: list[ToolCallReply] | None
    tool_call_id: None


class CheckpointReply(TypedDict):
    """A checkpoint in GET /models; listing them reads no more than their names, so nobody knows when they were made."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelReply(CheckpointReply):
    """A base model in GET /models. `context_length` in tokens, prompt and completion."""

    context_length: int
