"""Token ids back to text, one step at a time, never splitting a character.

The joined output equals what the tokenizer decodes from all the ids at once, with one exception. A reply keeps the
space that its first token begins with, because it continues a prompt.

The prompt itself never leaks. A character that the prompt's last token begins and the reply ends belongs to neither.
Its bytes in the reply decode by themselves (to U+FFFD).
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from renderers.deltas import Piece
from renderers.markers import AddedTokens, Tokenizer, added_tokens

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderUnknown(ValueError):
    """The tokenizer's decoder is of a kind that this module cannot run step by step."""


class Detokenizer(Protocol):
    """Decodes one reply."""

    def feed(self, token_ids: Iterable[int]) -> list[Piece]:
        """The text that became certain, in order. A marker is a piece of its own, with its `token_id`."""

    def flush(self) -> list[Piece]:
        """What was held back: the bytes of an unfinished character, as U+FFFD. Call once, last."""


class TokenTable(Protocol):
    """What each token of a vocabulary stands for. Build once per tokenizer; entries are added as tokens occur."""

    @property
    def added(self) -> AddedTokens: ...

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """For a reply to this prompt, or for a text on its own when there is none."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id that the tokenizer does not have."""

    def token_text(self, token_id: int) -> str:
        """One token by itself; bytes that are no character are U+FFFD. A marker is its spelling."""


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """Raises `DecoderUnknown`, naming the decoder."""
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    if state is not None and state["type"] == "ByteLevel":
        return ByteLevelTable(backend)
    return PieceTable(backend, _piece_decoding(state))


def visible_text(pieces: Iterable[Piece], special_ids: frozenset[int]) -> list[Piece]:
    """Pieces as a plain completion shows them: special tokens are gone, other markers are ordinary text."""
    return [
        piece if piece.token_id is None else Piece(piece.text) for piece in pieces if piece.token_id not in special_ids
    ]


class _Entries(dict[int, Any]):
    """What is known of each id, determined when it first occurs."""

    def __init__(self, find_out: Callable[[int], object]) -> None:
        super().__init__()
        self._find_out = find_out

    def __missing__(self, token_id: int) -> object:
        entry = self[token_id] = self._find_out(token_id)
        return entry


# --- byte-level vocabularies: every token is a string of bytes (GPT-2 and its descendants) ---


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, backwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class ByteLevelTable:
    """Entries are the token's `bytes`, or the `Piece` of a marker."""

    def __init__(self, backend: Backend) -> None:
        self.added = added_tokens(backend)
        self._backend = backend
        self._entries = _Entries(self._entry)
        self._texts = _Entries(lambda token_id: self.token_bytes(token_id).decode("utf-8", "replace"))

    def _entry(self, token_id: int) -> bytes | Piece:
        if token_id in self.added.markers:
            return Piece(self.added.markers[token_id].content, token_id)
        token: str = self._backend.id_to_token(token_id) or ""
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token that is plain text and not spelled in bytes
            return token.encode()

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        return _ByteLevelDetokenizer(self._entries)  # bytes have no context: the prompt plays no part

    def token_bytes(self, token_id: int) -> bytes:
        entry = self._entries[token_id]
        return entry.text.encode() if isinstance(entry, Piece) else entry

    def token_text(self, token_id: int) -> str:
        text: str = self._texts[token_id]
        return text


class _ByteLevelDetokenizer:
    def __init__(self, entries: Mapping[int, bytes | Piece]) -> None:
        self._entries = entries
        self._unfinished = b""

    def feed(self, token_ids: Iterable[int]) -> list[Piece]:
        entries, pieces, run = self._entries, [], [self._unfinished]
        for token_id in token_ids:
            entry = entries[token_id]
            if isinstance(entry, bytes):
                run.append(entry)
            else:
                text, _ = utf_8_decode(b"".join(run), "replace", True)
                if text:
                    pieces.append(Piece(text))
                pieces.append(entry)
                run = []
        # A truncated sequence at the end is not consumed; what can be no character is replaced at once.
        data = b"".join(run)
        text, consumed = utf_8_decode(data, "replace", False)
        self._unfinished = data[consumed:]
        if text:
            pieces.append(Piece(text))
        return pieces

    def flush(self) -> list[Piece]:
        text, _ = utf_8_decode(self._unfinished, "replace", True)
        self._unfinished = b""
        return [Piece(text)] if text else []


# --- vocabularies of text pieces: SentencePiece and its like, or plain words ---


@dataclass(frozen=True, slots=True)
class _PieceDecoding:
    """How pieces become text. Per token: the replacements, `<0xE2>` as a byte. At the start of a text only: all of
    `drop_first` is removed from the first token, and up to `strip_count` times `strip_char` from the whole.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    bytes_as_tokens: bool = False
    separator: str = ""
    drop_first: str = ""
    strip_char: str = ""
    strip_count: int = 0


def _piece_decoding(state: dict[str, Any] | None) -> _PieceDecoding:
    if state is None:
        return _PieceDecoding(separator=" ")
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    replacements: list[tuple[str, str]] = []
    found: dict[str, Any] = {}
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not fused:
                replacements.append((old, " "))
                found["drop_first"] = " " if step.get("prepend_scheme") != "never" else ""
            case {"type": "ByteFallback"} if not fused:
                found["bytes_as_tokens"] = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0} if fused:
                found |= {"strip_char": char, "strip_count": count}
            case _:
                raise DecoderUnknown(f"The tokenizer's decoder has a step that is not supported: {step!r}.")
    return _PieceDecoding(tuple(replacements), **found)


class PieceTable:
    """Entries are the token's text, the value of a byte token (an `int`), or the `Piece` of a marker."""

    def __init__(self, backend: Backend, decoding: _PieceDecoding) -> None:
        self.added = added_tokens(backend)
        self._backend = backend
        self._decoding = decoding
        self._entries = _Entries(self._entry)
        self._texts = _Entries(lambda token_id: self.token_bytes(token_id).decode("utf-8", "replace"))

    def _entry(self, token_id: int) -> str | int | Piece:
        if token_id in self.added.markers:
            return Piece(self.added.markers[token_id].content, token_id)
        token: str = self._backend.id_to_token(token_id) or ""
        if self._decoding.bytes_as_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return int(byte[1], 16)
        for old, new in self._decoding.replacements:
            token = token.replace(old, new)
        return token

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        return _PieceDetokenizer(self._entries, self._decoding, continues=len(prompt_token_ids) > 0)

    def token_bytes(self, token_id: int) -> bytes:
        entry = self._entries[token_id]
        if isinstance(entry, int):
            return bytes([entry])
        return (entry.text if isinstance(entry, Piece) else entry).encode()

    def token_text(self, token_id: int) -> str:
        text: str = self._texts[token_id]
        return text


class _PieceDetokenizer:
    def __init__(self, entries: Mapping[int, str | int | Piece], decoding: _PieceDecoding, *, continues: bool) -> None:
        self._entries = entries
        self._decoding = decoding
        self._at_start = not continues
        self._strip_count = 0 if continues else decoding.strip_count
        # A run of byte tokens is decoded as a whole: the tokenizer replaces all its bytes if one of them is wrong,
        # so none is certain before the run has ended.
        self._byte_run = bytearray()

    def feed(self, token_ids: Iterable[int]) -> list[Piece]:
        pieces: list[Piece] = []
        texts: list[str] = []
        for token_id in token_ids:
            entry = self._entries[token_id]
            if entry == "":
                continue  # an id that the tokenizer does not have
            if self._at_start or self._decoding.separator:
                entry = self._placed(entry, texts)
            if isinstance(entry, int):
                self._byte_run.append(entry)
                continue
            self._end_byte_run(texts)
            if isinstance(entry, Piece):
                self._emit(texts, pieces)
                self._strip_count = 0
                pieces.append(entry)
            else:
                texts.append(str(entry))
        self._emit(texts, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        texts: list[str] = []
        self._end_byte_run(texts)
        self._emit(texts, pieces)
        return pieces

    def _placed(self, entry: str | int | Piece, texts: list[str]) -> str | int | Piece:
        """A token at the start of a text loses its space; one between words gets its separator."""
        at_start, self._at_start = self._at_start, False
        if not at_start:
            self._end_byte_run(texts)
            texts.append(self._decoding.separator)
        elif isinstance(entry, str) and self._decoding.drop_first:
            return entry.replace(self._decoding.drop_first, "")
        return entry

    def _end_byte_run(self, texts: list[str]) -> None:
        if not self._byte_run:
            return
        try:
            texts.append(self._byte_run.decode())
        except UnicodeDecodeError:
            texts.append(_REPLACEMENT * len(self._byte_run))
        self._byte_run.clear()

    def _emit(self, texts: list[str], pieces: list[Piece]) -> None:
        text = "".join(texts)
        texts.clear()
        while text and self._strip_count:
            if text.startswith(self._decoding.strip_char):
                text = text.removeprefix(self._decoding.strip_char)
                self._strip_count -= 1
            else:
                self._strip_count = 0
        if text:
            pieces.append(Piece(text))
