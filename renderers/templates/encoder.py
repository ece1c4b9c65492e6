"""A rendered prompt to token ids: markers where the template wrote them, ordinary text everywhere else.

The tokenizer used here is the model's own without its markers. Each marker that the template wrote is replaced by a
stand-in: a random string that nobody can guess and that this tokenizer knows as an added token. The ids of the
stand-ins are then exchanged for those of the markers.

So only a stand-in can become a marker's id. The whole prompt still goes through the model's own pipeline at once. Text
between two markers is normalised, split and merged as if the markers themselves stood there.
"""

import re
import secrets
from collections.abc import Iterable

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from renderers.base import RenderError
from renderers.markers import AddedTokens
from renderers.templates.provenance import TracedText

_BREAKER_ID = -1
_UNKNOWN = "\U0010fffd"
"""A character that no vocabulary has."""
_MAX_ROUNDS = 8


class PromptEncoder:
    """Bound to one tokenizer; thread-safe."""

    def __init__(self, backend: Backend, added: AddedTokens) -> None:
        # Letters and digits only, in lower case: no normalizer changes them.
        self._nonce = f"zq{secrets.token_hex(16)}x"
        self._breaker = f"{self._nonce}breaker"
        self._markers = added.markers
        self._stand_ins = {token.content: f"{self._nonce}{token_id:010d}" for token_id, token in added.markers.items()}
        longest_first = sorted(self._stand_ins, key=len, reverse=True)
        self._marker_spelling = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._single_words = {token.content for token in added.markers.values() if token.single_word}
        self._backend = Backend(backend.model)  # shares the model
        self._backend.normalizer = backend.normalizer
        self._backend.pre_tokenizer = backend.pre_tokenizer
        self._exchange = self._register(added)
        self._stand_in_ids = frozenset(here for here, there in self._exchange.items() if there in added.markers)
        # A stand-in's id here may happen to be a marker's id there.
        self._forgeable_ids = frozenset(added.markers).difference(self._exchange)
        self._unknown_ids = frozenset(self._backend.encode(_UNKNOWN, add_special_tokens=False).ids)

    def _register(self, added: AddedTokens) -> dict[int, int]:
        """Add the stand-ins and the plain added tokens to the tokenizer. Returns the model's ids of both by their ids
        here.
        """
        here = {self._breaker: (AddedToken(self._breaker, normalized=False), _BREAKER_ID)}
        for token_id, token in added.markers.items():
            stand_in = self._stand_ins[token.content]
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
            here[stand_in] = (AddedToken(stand_in, **flags), token_id)
        here |= {token.content: (token, token_id) for token_id, token in added.plain.items()}
        self._backend.add_tokens([token for token, _ in here.values()])
        vocabulary = self._backend.get_added_tokens_decoder()
        return {token_id: here[token.content][1] for token_id, token in vocabulary.items()}

    def encode(self, text: TracedText) -> list[int]:
        """Raises `RenderError` if some text is not Unicode, or this tokenizer cannot distinguish it from a marker."""
        _check_unicode(text)
        if self._nonce in text:
            raise RenderError("messages: a text holds a string that is private to this server.")
        prompt, count = self._with_stand_ins(text)
        broken = False
        for _ in range(_MAX_ROUNDS):
            encoding = self._backend.encode(prompt, add_special_tokens=False)
            ids = encoding.ids
            if self._forgeable_ids.isdisjoint(ids):
                break
            forged = [
                span
                for token_id, span in zip(ids, encoding.offsets, strict=True)
                if token_id in self._forgeable_ids and self._is_forged(token_id, prompt[slice(*span)])
            ]
            if not forged:
                break
            prompt, broken = self._broken(prompt, forged), True
        else:
            raise RenderError("messages: a text holds the spelling of a special token that cannot be sent as text.")
        if sum(map(self._stand_in_ids.__contains__, ids)) != count:
            raise RenderError("The tokenizer does not recognise a special token where the chat template writes it.")
        exchanged = list(map(self._exchange.get, ids, ids))
        return [token_id for token_id in exchanged if token_id != _BREAKER_ID] if broken else exchanged

    def _is_forged(self, token_id: int, text: str) -> bool:
        """Some models make a marker's id out of ordinary text as well: a Unigram vocabulary lists its markers.

        The token for unknown text is a marker too, and comes from text as it should, unless the text is its spelling.
        """
        return token_id not in self._unknown_ids or self._markers[token_id].content in text

    def _with_stand_ins(self, text: TracedText) -> tuple[str, int]:
        """The prompt with each marker that lies in trusted text alone replaced, and how many there are."""
        parts: list[str] = []
        done = count = 0
        plain = "".join([text])
        for start, end in text.trusted_runs():
            for found in self._marker_spelling.finditer(plain, start, end):
                if found[0] in self._single_words and _touches_word(plain, found.span()):
                    continue
                parts += [plain[done : found.start()], self._stand_ins[found[0]]]
                done = found.end()
                count += 1
        return "".join([*parts, plain[done:]]), count

    def _broken(self, prompt: str, spans: Iterable[tuple[int, int]]) -> str:
        """The prompt with a token that is dropped later in the middle of each of these spans."""
        parts, done = [], 0
        for start, end in spans:
            middle = max(start + 1, (start + end) // 2)
            parts += [prompt[done:middle], self._breaker]
            done = middle
        return "".join([*parts, prompt[done:]])


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise RenderError(f"messages: a text holds half of a surrogate pair, U+{ord(text[exc.start]):04X}.") from exc


def _touches_word(text: str, span: tuple[int, int]) -> bool:
    start, end = span
    return bool(re.search(r"\w", text[max(0, start - 1) : start] + text[end : end + 1]))
