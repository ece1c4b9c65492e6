"""What only chats do: the model's template renders the messages, and the reply is parsed."""

from renderers.base import PromptTooLong, RenderedPrompt
from serve_app.api.answer import Edge, new_head
from serve_app.api.opening import Operation, Prepared
from serve_app.api.prompts.prompt_images import prepare_images
from serve_app.api.prompts.prompt_limits import at_least, check_conversation_length, too_long
from serve_app.api.replies.chunks import ChatChunks
from serve_app.api.replies.reply import Reply, TextReader
from serve_app.api.requests import ChatRequest
from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.slug import SlugChatBody
from serve_app.api.ticket import Ticket
from serve_app.api.tool_check import ToolCheck
from serve_app.api.validate import generate_request, validate_chat
from serve_app.base.logs import engine_request_id
from serve_app.catalog.catalog import ResolvedModel
from serve_app.catalog.checkpoint_templates import RENDER_US
from serve_app.images.preparing import ImagePrompt, fill_placeholders

VALIDATE_US_PER_BYTE = 1 / 20
RENDER_US_PER_BYTE = 1.0


async def prepare_chat(edge: Edge, ticket: Ticket, body: ChatBody, target: ResolvedModel) -> Prepared:
    """Raises `InvalidRequest` or `RenderError`."""
    during = ticket.record.stages.during
    with during("validate"):
        cost_us = ticket.body_bytes * VALIDATE_US_PER_BYTE
        request = await edge.workers.run(cost_us, validate_chat, body, target, edge.limits)
    with during("render"):
        prompt = await edge.workers.run(_render_us(request, target, ticket.body_bytes), _render, request, target)
    filled = await _with_images(edge, ticket, target, request, prompt)
    head = new_head("chatcmpl", target, request.options, filled.token_ids)
    reply = Reply(
        TextReader(target.model.table.detokenizer(prompt.token_ids), _stop_strings(request)),
        request.renderer.parser(prompt, request.conversation.tools),
        num_prompt_tokens=len(filled.token_ids),
        end_token_ids=target.end_token_ids,
        separate_reasoning=request.separate_reasoning,
    )
    return Prepared(
        generate=generate_request(
            request, filled, target, ticket.caller, request_id=engine_request_id(ticket.record.request_id, head.id)
        ),
        asked_tokens=request.max_tokens,
        prompt_cache_key=request.prompt_cache_key,
        reply=reply,
        chunks=ChatChunks(head, target.model.table),
        tool_check=ToolCheck(request.tool_rules),
    )


async def _with_images(
    edge: Edge, ticket: Ticket, target: ResolvedModel, request: ChatRequest, prompt: RenderedPrompt
) -> ImagePrompt:
    if not request.images:
        return ImagePrompt(prompt.token_ids)
    frame, images = await prepare_images(edge, ticket, target, request.images)
    return fill_placeholders(prompt.token_ids, frame, images)


def _stop_strings(request: ChatRequest) -> tuple[str, ...]:
    return (*request.options.stop_strings, *request.renderer.stop_strings)


def _render_us(request: ChatRequest, target: ResolvedModel, body_bytes: int) -> float:
    """Cost of rendering. A checkpoint's own template counts with its full time limit, whatever the body."""
    cost_us = body_bytes * RENDER_US_PER_BYTE
    return cost_us if request.renderer is target.model.renderer else max(cost_us, RENDER_US)


def _render(request: ChatRequest, target: ResolvedModel) -> RenderedPrompt:
    check_conversation_length(request, target.model, target.context_length)
    try:
        return request.renderer.render(request.conversation)
    except PromptTooLong as exc:
        raise too_long("messages", target.context_length, at_least(exc.num_tokens)) from exc


CHATS = Operation("/chat/completions", ChatBody, SlugChatBody, prepare_chat)
