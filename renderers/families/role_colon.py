"""`User: …`, `Assistant: …`: a chat for base models that have no chat format. The catalogue must ask for it."""

from collections.abc import Sequence

from renderers.base import RenderedPrompt, RenderError
from renderers.efforts import refuse_effort
from renderers.families.generic import PlainParser
from renderers.markers import Tokenizer, added_tokens
from renderers.messages import Conversation, Effort, Message, Role, TextPart, Tool
from renderers.templates.chat_template import ChatTemplate
from renderers.templates.encoder import PromptEncoder
from renderers.templates.provenance import TracedText

_NAMES = {Role.SYSTEM: "System", Role.USER: "User", Role.ASSISTANT: "Assistant"}


class RoleColonRenderer:
    """No tools, no reasoning. A reply ends at the model's end token or where the user's next turn would begin."""

    name = "role_colon"
    supports_tools = False
    stop_strings: tuple[str, ...] = ("\n\nUser:",)

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        backend = tokenizer.backend_tokenizer
        self._encoder = PromptEncoder(backend, added_tokens(backend))
        bos = tokenizer.special_tokens_map.get("bos_token")
        self._beginning = TracedText.trusted(bos if isinstance(bos, str) else "")
        end = tokenizer.eos_token_id
        self.stop_token_ids = frozenset(() if end is None else (end,))

    def check_effort(self, effort: Effort | None) -> None:
        refuse_effort(effort)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        self.check_effort(conversation.effort)
        if conversation.tools:
            raise RenderError("tools: this model has no tool-call support.", "tools")
        turns = [_turn(message, index) for index, message in enumerate(conversation.messages)]
        return RenderedPrompt(
            tuple(self._encoder.encode(TracedText("", b"").join([self._beginning, *turns, "Assistant:"])))
        )

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> PlainParser:
        return PlainParser(self.stop_token_ids, framing=" ")


def _turn(message: Message, index: int) -> str:
    if message.role is Role.TOOL or message.tool_calls:
        raise RenderError(f"messages[{index}]: this model has no tool-call support.")
    if not all(isinstance(part, TextPart) for part in message.content or ()):
        raise RenderError(f"messages[{index}]: this model takes no images.")
    return f"{_NAMES[message.role]}: {message.text}\n\n"
