"""A completion request from its body to the answer under way: the path of `chat.py` without a renderer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_app.api.answer import Answer, Edge, affinity_of, new_head
from serve_app.api.body_limits import check_sizes
from serve_app.api.chunks import TextChunks
from serve_app.api.prompt import PromptTokens, detokenize, tokenize, tokenize_for_echo
from serve_app.api.prompt_limits import check_prompt_length
from serve_app.api.reply import Reply, TextReader, UnformattedParser
from serve_app.api.schema.completion import CompletionBody
from serve_app.api.schema.sampling import parse_body
from serve_app.api.ticket import JsonObject, Ticket
from serve_app.api.tool_check import ToolCheck
from serve_app.api.validate import CompletionRequest, ToolRules, generate_request, validate_completion
from serve_app.catalog.catalog import ResolvedModel
from serve_app.replicas.generation import open_generation
from serve_app.workers import Workers


@asynccontextmanager
async def open_completion(edge: Edge, ticket: Ticket, raw: JsonObject) -> AsyncIterator[Answer]:
    """Raises a `RequestError`, `RenderError`, `CheckpointError`, `EngineError` or `ServingError` before it yields."""
    check_sizes(raw, edge.limits, edge.catalog.longest_context)
    body = await edge.workers.run(ticket.body_bytes / 40, parse_body, CompletionBody, raw)
    ticket.ignored_fields = body.ignored_fields(raw)
    target = await edge.catalog.resolve(body.model, ticket.caller)
    request = validate_completion(body, target, edge.limits)
    ticket.record.about(target, streamed=request.options.stream)
    prompt = await _prompt(request, target, edge.workers)
    head = new_head("cmpl", target, request.options, None if request.from_chunks else prompt.token_ids)
    generate = generate_request(request, prompt.token_ids, target, ticket.caller, request_id=head.id)
    reader = TextReader(
        target.model.table.detokenizer(prompt.token_ids),
        request.options.stop_strings,
        hidden_ids=target.model.table.added.special_ids,
        offset=len(prompt.text) if request.echo else 0,
    )
    reply = Reply(
        reader, UnformattedParser(), num_prompt_tokens=len(prompt.token_ids), end_token_ids=target.end_token_ids
    )
    chunks = TextChunks(head, target.model.table)
    ticket.charge_prompt(len(prompt.token_ids))
    affinity = affinity_of(request.prompt_cache_key, generate)
    deltas = edge.replicas.generate(target.deployment, generate, affinity=affinity)
    async with open_generation(deltas, edge.limits.first_token_timeout_s) as generation:
        preface = prompt.echo if request.echo else None
        check = ToolCheck(ToolRules())
        yield Answer(request.options.stream, generation, reply, chunks, check, edge.workers, preface)


async def _prompt(request: CompletionRequest, target: ResolvedModel, workers: Workers) -> PromptTokens:
    if isinstance(request.prompt, str):
        cost_us = len(request.prompt)
        await workers.run(cost_us, check_prompt_length, request.prompt, target.model, target.context_length)
        return await workers.run(cost_us, tokenize_for_echo if request.echo else tokenize, request.prompt, target.model)
    if request.echo:
        return await workers.run(4 * len(request.prompt), detokenize, request.prompt, target.model.table)
    return PromptTokens(request.prompt)
