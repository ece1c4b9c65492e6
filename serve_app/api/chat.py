"""READ THIS FIRST: a chat request from its body to the answer under way, in one function."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from renderers.base import RenderedPrompt
from serve_app.api.answer import Answer, Edge, affinity_of, new_head
from serve_app.api.body_limits import check_sizes
from serve_app.api.chunks import ChatChunks
from serve_app.api.prompt_limits import check_conversation_length
from serve_app.api.reply import Reply, TextReader
from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.sampling import parse_body
from serve_app.api.ticket import JsonObject, Ticket
from serve_app.api.tool_check import ToolCheck
from serve_app.api.validate import ChatRequest, generate_request, validate_chat
from serve_app.catalog.catalog import ResolvedModel
from serve_app.catalog.checkpoint_templates import RENDER_US
from serve_app.replicas.generation import open_generation


@asynccontextmanager
async def open_chat(edge: Edge, ticket: Ticket, raw: JsonObject) -> AsyncIterator[Answer]:
    """Raises a `RequestError`, `RenderError`, `CheckpointError`, `EngineError` or `ServingError` before it yields."""
    check_sizes(raw, edge.limits, edge.catalog.longest_context)
    body = await edge.workers.run(ticket.body_bytes / 20, parse_body, ChatBody, raw)
    ticket.ignored_fields = body.ignored_fields(raw)
    target = await edge.catalog.resolve(body.model, ticket.caller)
    request = await edge.workers.run(ticket.body_bytes / 20, validate_chat, body, target, edge.limits)
    ticket.record.about(target, streamed=request.options.stream)
    prompt = await edge.workers.run(_render_us(request, target, ticket.body_bytes), _render, request, target)
    head = new_head("chatcmpl", target, request.options, prompt.token_ids)
    generate = generate_request(request, prompt.token_ids, target, ticket.caller, request_id=head.id)
    reply = Reply(
        TextReader(target.model.table.detokenizer(prompt.token_ids), _stop_strings(request)),
        request.renderer.parser(prompt, request.conversation.tools),
        num_prompt_tokens=len(prompt.token_ids),
        end_token_ids=target.end_token_ids,
        separate_reasoning=request.separate_reasoning,
    )
    ticket.charge_prompt(len(prompt.token_ids))
    affinity = affinity_of(request.prompt_cache_key, generate)
    deltas = edge.replicas.generate(target.deployment, generate, affinity=affinity)
    async with open_generation(deltas, edge.limits.first_token_timeout_s) as generation:
        chunks, check = ChatChunks(head, target.model.table), ToolCheck(request.tool_rules)
        yield Answer(request.options.stream, generation, reply, chunks, check, edge.workers)


def _stop_strings(request: ChatRequest) -> tuple[str, ...]:
    return (*request.options.stop_strings, *request.renderer.stop_strings)


def _render_us(request: ChatRequest, target: ResolvedModel, body_bytes: int) -> int:
    """About a microsecond per byte of the body. A template that a checkpoint brought along may take what it is allowed
    to take, whatever the body.
    """
    return body_bytes if request.renderer is target.model.renderer else max(body_bytes, RENDER_US)


def _render(request: ChatRequest, target: ResolvedModel) -> RenderedPrompt:
    check_conversation_length(request, target.model, target.context_length)
    return request.renderer.render(request.conversation)
