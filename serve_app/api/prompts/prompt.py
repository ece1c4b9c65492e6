"""The prompt of a completion as tokens, and as the text that `echo` repeats."""

from dataclasses import dataclass

from engines.interface.protocol import TokenDelta
from renderers.replies.detokenize import TokenTable
from serve_app.api.replies.reply import ReplyPart
from serve_app.api.replies.scores import Scored
from serve_app.base.errors import InvalidRequest
from serve_app.catalog.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """`offsets`: for each token the character of `text` that it begins at. Both are empty unless they are needed."""

    token_ids: tuple[int, ...]
    text: str = ""
    offsets: tuple[int, ...] = ()

    def echo(self, first: TokenDelta) -> ReplyPart:
        """The part that repeats the prompt, with its log-probabilities if the engine computed them."""
        scored = tuple(map(Scored, self.token_ids, first.prompt_logprobs, self.offsets)) if self.offsets else ()
        return ReplyPart(text=self.text, scored=scored)


def tokenize(prompt: str, model: ServedModel) -> PromptTokens:
    """Tokenize by the tokenizer's defaults; the text of a special token becomes that token. Raises `InvalidRequest`."""
    (encoding,) = model.tokenizer.backend_tokenizer.encode_batch_fast([prompt])
    return PromptTokens(_not_empty(prompt, encoding.ids))


def tokenize_for_echo(prompt: str, model: ServedModel) -> PromptTokens:
    """Tokenize, and keep the text and offsets that `echo` needs."""
    encoding = model.tokenizer.backend_tokenizer.encode(prompt)
    return PromptTokens(_not_empty(prompt, encoding.ids), prompt, tuple(start for start, _ in encoding.offsets))


def _not_empty(prompt: str, token_ids: list[int]) -> tuple[int, ...]:
    if not token_ids:
        raise InvalidRequest(
            f"prompt must have at least one token, got {len(prompt)} characters that give none.", "prompt"
        )
    return tuple(token_ids)


def detokenize(token_ids: tuple[int, ...], table: TokenTable) -> PromptTokens:
    """The text and offsets of a prompt that came as token ids, special tokens spelled out as in a prompt of text."""
    detokenizer, length = table.detokenizer(), 0
    texts: list[str] = []
    offsets: list[int] = []
    for token_id in token_ids:
        offsets.append(length)
        pieces = detokenizer.feed((token_id,))
        texts += [piece.text for piece in pieces]
        length += sum(len(piece.text) for piece in pieces)
    texts += [piece.text for piece in detokenizer.flush()]
    return PromptTokens(token_ids, "".join(texts), tuple(offsets))
