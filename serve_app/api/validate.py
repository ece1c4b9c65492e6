"""Checks every rule between fields, and between a request and its model. Only this module makes the values in
`requests.py`.
"""

import secrets
from collections.abc import Sequence
from functools import partial

from engines.protocol import GenerateRequest, SamplingParams
from renderers.messages import ContentPart, Conversation, ImagePart, Message, Role, TextPart, Tool, ToolCall
from serve_app.access.auth import Caller
from serve_app.api.prompt_limits import check_context
from serve_app.api.requests import (
    SAMPLING_DEFAULTS,
    ChatRequest,
    CompletionRequest,
    ReplyOptions,
    Sampling,
    ToolRules,
)
from serve_app.api.schema.chat import ChatBody, ImageContent, MessageBody, NamedFunction, ToolBody
from serve_app.api.schema.completion import CompletionBody, ImageChunk, Prompt
from serve_app.api.schema.sampling import SamplingFields
from serve_app.catalog.catalog import ResolvedModel
from serve_app.config.service import LimitsConfig
from serve_app.errors import InvalidRequest
from serve_app.images.preparing import ImagePrompt, ImageUrl

_UINT64 = 2**64


def validate_chat(body: ChatBody, target: ResolvedModel, limits: LimitsConfig) -> ChatRequest:
    """Raises `InvalidRequest` or `RenderError`."""
    if target.renderer is None:
        raise InvalidRequest(
            f"The model {target.requested!r} has no chat template; use POST /completions with a prompt.", "model"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(f"top_logprobs needs logprobs to be true, got {body.top_logprobs}.", "top_logprobs")
    target.renderer.check_effort(body.reasoning_effort)
    tools = _tools(body.tools or ())
    images = _Images(target, limits)
    messages = tuple(_message(message, index, images) for index, message in enumerate(body.messages))
    _check_results(messages)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return ChatRequest(
        conversation=Conversation(messages, tools, body.reasoning_effort),
        images=tuple(images.found),
        tools_characters=sum(tool.num_characters for tool in body.tools or ()),
        renderer=target.renderer,
        tool_rules=_tool_rules(body, tools, target),
        separate_reasoning=body.separate_reasoning is not False,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        sampling=_sampling(body, target, logprobs=logprobs),
        options=_options(body, limits, logprobs=logprobs),
        prompt_cache_key=body.prompt_cache_key or "",
    )


def validate_completion(body: CompletionBody, target: ResolvedModel, limits: LimitsConfig) -> CompletionRequest:
    """Raises `InvalidRequest`."""
    chunks = _chunks(body, target, limits)
    echo = bool(body.echo)
    if echo and body.prompt_chunks is not None:
        raise InvalidRequest("echo needs prompt; it cannot repeat prompt_chunks, got true.", "echo")
    if body.max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens must be at least 1 (or 0 together with echo), got 0.", "max_tokens")
    return CompletionRequest(
        prompt=_prompt(body, chunks, target),
        chunks=chunks,
        echo=echo,
        max_tokens=body.max_tokens,
        sampling=_sampling(body, target, logprobs=body.logprobs, prompt_logprobs=body.logprobs if echo else None),
        options=_options(body, limits, logprobs=body.logprobs),
        prompt_cache_key=body.prompt_cache_key or "",
    )


def generate_request(
    request: ChatRequest | CompletionRequest,
    prompt: ImagePrompt,
    target: ResolvedModel,
    caller: Caller,
    *,
    request_id: str,
) -> GenerateRequest:
    """Fit prompt and reply into the context. Raises `InvalidRequest`."""
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    max_tokens = check_context(field, len(prompt.token_ids), request.max_tokens, target.context_length)
    sampling = request.sampling(max_tokens=max_tokens)
    return GenerateRequest(request_id, prompt.token_ids, sampling, target.adapter, caller.name, prompt.images)


def _sampling(
    body: SamplingFields, target: ResolvedModel, *, logprobs: int | None, prompt_logprobs: int | None = None
) -> Sampling:
    biases = body.logit_bias or {}
    for token_id in biases:
        _in_vocabulary("logit_bias", token_id, target)
    stop_ids = body.stop.token_ids if body.stop is not None else ()
    for token_id in stop_ids:
        _in_vocabulary("stop", token_id, target)
    return partial(
        SamplingParams,
        seed=secrets.randbits(64) if body.seed is None else body.seed % _UINT64,
        temperature=_or_default("temperature", body.temperature),
        top_p=_or_default("top_p", body.top_p),
        top_k=_top_k(body.top_k or 0, target.model.vocab_size),
        min_p=_or_default("min_p", body.min_p),
        presence_penalty=_or_default("presence_penalty", body.presence_penalty),
        frequency_penalty=_or_default("frequency_penalty", body.frequency_penalty),
        repetition_penalty=_or_default("repetition_penalty", body.repetition_penalty),
        logit_bias=tuple(biases.items()),
        stop_token_ids=target.end_token_ids.union(stop_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _top_k(asked: int, vocab_size: int) -> int:
    """0 for all tokens, whatever number the caller wrote: samplers count in 64 bits, JSON has no limit."""
    return asked if 0 < asked < vocab_size else 0


def _options(body: SamplingFields, limits: LimitsConfig, *, logprobs: int | None) -> ReplyOptions:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true, got stream_options without it.", "stream_options")
    strings = body.stop.strings if body.stop is not None else ()
    for string in strings:
        if len(string) > limits.stop_characters:
            raise InvalidRequest(
                f"Each string of stop must have at most {limits.stop_characters} characters, got {len(string)}.", "stop"
            )
    return ReplyOptions(
        stream=bool(body.stream),
        include_usage=bool(body.stream_options is not None and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
        stop_strings=strings,
    )


def _chunks(
    body: CompletionBody, target: ResolvedModel, limits: LimitsConfig
) -> tuple[tuple[int, ...] | ImageUrl, ...]:
    if (body.prompt is None) == (body.prompt_chunks is None):
        given = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"Exactly one of prompt and prompt_chunks must be set, got {given}.", "prompt")
    images = _Images(target, limits)
    found: list[tuple[int, ...] | ImageUrl] = []
    for index, chunk in enumerate(body.prompt_chunks or ()):
        if isinstance(chunk, ImageChunk):
            images.add(chunk.url, f"prompt_chunks[{index}]")
            found.append(images.found[-1])
        else:
            _in_vocabulary("prompt_chunks", max(chunk.token_ids), target)
            found.append(chunk.token_ids)
    return tuple(found)


def _prompt(body: CompletionBody, chunks: Sequence[tuple[int, ...] | ImageUrl], target: ResolvedModel) -> Prompt:
    if body.prompt is None:
        return tuple(token_id for chunk in chunks if not isinstance(chunk, ImageUrl) for token_id in chunk)
    if not isinstance(body.prompt, str):
        _in_vocabulary("prompt", max(body.prompt), target)
    return body.prompt


def _tools(bodies: Sequence[ToolBody]) -> tuple[Tool, ...]:
    names = [body.function.name for body in bodies]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"tools[{index}].function.name must be unique, got {name!r} twice.", "tools")
    return tuple(Tool(body.function.name, body.function.parameters or {}, body.declared) for body in bodies)


def _tool_rules(body: ChatBody, tools: Sequence[Tool], target: ResolvedModel) -> ToolRules:
    choice = body.tool_choice or "auto"
    rules = ToolRules(choice, body.parallel_tool_calls is not False)
    if choice in ("auto", "none"):
        return rules
    assert target.renderer is not None
    shown = choice.name if isinstance(choice, NamedFunction) else choice
    if not target.renderer.supports_tools:
        raise InvalidRequest(
            f"tool_choice {shown!r} cannot be served: the model {target.requested!r} has no tool-call support.",
            "tool_choice",
        )
    if not tools:
        raise InvalidRequest(f"tool_choice {shown!r} needs tools.", "tool_choice")
    if isinstance(choice, NamedFunction) and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequest(f"tool_choice must name one of tools, got {choice.name!r}.", "tool_choice")
    return rules


def _message(body: MessageBody, index: int, images: "_Images") -> Message:
    at = f"messages[{index}]"
    role = Role.SYSTEM if body.role == "developer" else Role(body.role)
    only = {"reasoning_content": Role.ASSISTANT, "tool_calls": Role.ASSISTANT, "tool_call_id": Role.TOOL}
    for field, its_role in only.items():
        if getattr(body, field) and role is not its_role:
            raise InvalidRequest(f"{at}.{field} is for the role {its_role} only, got role {body.role!r}.", at)
    if body.content is None and role is not Role.ASSISTANT:
        raise InvalidRequest(f"{at}.content must be a string or a list of parts, got null.", f"{at}.content")
    if role is Role.TOOL and body.tool_call_id is None:
        raise InvalidRequest(f"{at}.tool_call_id is required for the role tool.", f"{at}.tool_call_id")
    calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in body.tool_calls or ())
    return Message(role, _parts(body, at, images), body.reasoning_content, calls, body.tool_call_id, body.name)


def _check_results(messages: Sequence[Message]) -> None:
    """Each result is of a call before it, from which templates take the function's name."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.tool_call_id is not None and message.tool_call_id not in called:
            at = f"messages[{index}].tool_call_id"
            raise InvalidRequest(
                f"{at} must be the id of a call in an earlier message, got {message.tool_call_id!r}.", at
            )


def _parts(body: MessageBody, at: str, images: "_Images") -> tuple[ContentPart, ...] | None:
    if body.content is None:
        return None
    return tuple(
        images.add(part.url, f"{at}.content[{index}]") if isinstance(part, ImageContent) else TextPart(part.text)
        for index, part in enumerate(body.content)
    )


class _Images:
    """Collects the images of a request for a model that takes them."""

    def __init__(self, target: ResolvedModel, limits: LimitsConfig) -> None:
        self._target = target
        self._limit = limits.images
        self.found: list[ImageUrl] = []

    def add(self, url: str, at: str) -> ImagePart:
        """Raises `InvalidRequest`."""
        if not self._target.model.takes_images:
            raise InvalidRequest(f"{at} is an image, and the model {self._target.requested!r} takes no images.", at)
        if len(self.found) == self._limit:
            raise InvalidRequest(f"A request must have at most {self._limit} images, got another one at {at}.", at)
        self.found.append(ImageUrl(url, at))
        return ImagePart(len(self.found) - 1)


def _in_vocabulary(field: str, token_id: int, target: ResolvedModel) -> None:
    if token_id >= target.model.vocab_size:
        raise InvalidRequest(
            f"{field} must hold token ids below the vocabulary size {target.model.vocab_size}, got {token_id}.", field
        )


def _or_default(name: str, value: float | None) -> float:
    return SAMPLING_DEFAULTS[name] if value is None else value
