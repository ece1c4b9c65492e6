"""What only completions do: the prompt is plain text or token ids, and the reply is not parsed."""

from serve_app.api.answer import Edge, new_head
from serve_app.api.opening import Operation, Prepared
from serve_app.api.prompts.prompt import PromptTokens, detokenize, tokenize, tokenize_for_echo
from serve_app.api.prompts.prompt_images import prepare_images
from serve_app.api.prompts.prompt_limits import check_prompt_length
from serve_app.api.replies.chunks import TextChunks
from serve_app.api.replies.reply import Reply, TextReader, UnformattedParser
from serve_app.api.requests import CompletionRequest, ToolRules
from serve_app.api.schema.completion import CompletionBody
from serve_app.api.schema.slug import SlugCompletionBody
from serve_app.api.ticket import Ticket
from serve_app.api.tool_check import ToolCheck
from serve_app.api.validate import generate_request, validate_completion
from serve_app.base.logs import engine_request_id
from serve_app.base.workers import Workers
from serve_app.catalog.catalog import ResolvedModel
from serve_app.images.preparing import ImagePrompt, ImageUrl, join_chunks

TOKENIZE_US_PER_CHARACTER = 1.0
DETOKENIZE_US_PER_TOKEN = 4.0


async def prepare_completion(edge: Edge, ticket: Ticket, body: CompletionBody, target: ResolvedModel) -> Prepared:
    """Raises `InvalidRequest`."""
    during = ticket.record.stages.during
    with during("validate"):
        request = validate_completion(body, target, edge.limits)
    with during("render"):
        prompt = await _prompt(request, target, edge.workers)
    filled = await _with_images(edge, ticket, target, request, prompt)
    head = new_head("cmpl", target, request.options, None if request.chunks else prompt.token_ids)
    reader = TextReader(
        target.model.table.detokenizer(prompt.token_ids),
        request.options.stop_strings,
        hidden_ids=target.model.table.added.special_ids,
        offset=len(prompt.text) if request.echo else 0,
    )
    return Prepared(
        generate=generate_request(
            request, filled, target, ticket.caller, request_id=engine_request_id(ticket.record.request_id, head.id)
        ),
        asked_tokens=request.max_tokens,
        prompt_cache_key=request.prompt_cache_key,
        reply=Reply(
            reader, UnformattedParser(), num_prompt_tokens=len(filled.token_ids), end_token_ids=target.end_token_ids
        ),
        chunks=TextChunks(head, target.model.table),
        tool_check=ToolCheck(ToolRules()),
        preface=prompt.echo if request.echo else None,
    )


async def _with_images(
    edge: Edge, ticket: Ticket, target: ResolvedModel, request: CompletionRequest, prompt: PromptTokens
) -> ImagePrompt:
    urls = [chunk for chunk in request.chunks if isinstance(chunk, ImageUrl)]
    if not urls:
        return ImagePrompt(prompt.token_ids)
    frame, images = await prepare_images(edge, ticket, target, urls)
    waiting = iter(images)
    return join_chunks([next(waiting) if isinstance(c, ImageUrl) else c for c in request.chunks], frame)


async def _prompt(request: CompletionRequest, target: ResolvedModel, workers: Workers) -> PromptTokens:
    if isinstance(request.prompt, str):
        cost_us = len(request.prompt) * TOKENIZE_US_PER_CHARACTER
        await workers.run(cost_us, check_prompt_length, request.prompt, target.model, target.context_length)
        return await workers.run(cost_us, tokenize_for_echo if request.echo else tokenize, request.prompt, target.model)
    if request.echo:
        cost_us = len(request.prompt) * DETOKENIZE_US_PER_TOKEN
        return await workers.run(cost_us, detokenize, request.prompt, target.model.table)
    return PromptTokens(request.prompt)


COMPLETIONS = Operation("/completions", CompletionBody, SlugCompletionBody, prepare_completion)
