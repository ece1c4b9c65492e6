"""What the renderers' tests share: small tokenizers of every kind, templates, conversations, the oracle."""

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from renderers.base import RenderedPrompt, Renderer, ReplyEnd
from renderers.deltas import Delta, Piece, ReasoningDelta, TextDelta, ToolCallDelta
from renderers.messages import Conversation, Message, Role, TextPart, Tool, ToolCall
from renderers.replies.detokenize import token_table

TEMPLATES = Path(__file__).parents[1] / "renderers" / "templates"

CORPUS = [
    "The capital of France is Paris. It is also the largest city in France, and what is the weather there today?",
    'You are a helpful assistant. {"name": "get_weather", "arguments": {"city": "Paris"}} user assistant system\n\n',
    "日本の首都は東京です。한국의 수도는 서울입니다. Grüße aus Köln! 👩‍👩‍👧‍👦 👍🏽 🇫🇮 naïve café",
    "# Tools\n\nYou may call one or more functions to assist with the user query within <tools></tools> XML tags:\n",
]

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
QWEN_MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as Qwen3's: its pattern, NFC, its markers with their flags; 500 tokens."""
    backend = _byte_level_backend()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in QWEN_SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in QWEN_MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def family_tokenizer(
    special: Sequence[str], markers: Sequence[str] = (), *, eos: str, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens of a family, and its markers that are not special."""
    backend = _byte_level_backend()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in markers])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)


@cache
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML's special tokens only, in the model's vocabulary as well: SmolLM2's kind."""
    backend = _byte_level_backend(special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


@cache
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's BPE with byte fallback, as Llama 2 and Mistral have it."""
    pieces = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | pieces
    merges = [("▁", "P"), ("a", "r"), ("i", "s"), ("▁P", "ar"), ("▁Par", "is"), ("▁", "▁"), ("h", "e"), ("▁", "t")]
    for piece in [*"▁Parishetcno.:|<>/[]INSTUSEy_ml\n", *("".join(pair) for pair in merges)]:
        vocabulary.setdefault(piece, len(vocabulary))
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "[INST]")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """A Unigram model that lists its own markers among its pieces, so that plain text can become one."""
    special = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    pieces = [(token, 0.0) for token in special]
    pieces += [(char, -5.0) for char in sorted({*"".join(CORPUS), *string.printable, "▁"} - {" "})]
    pieces += [("▁the", -3.0), ("▁Paris", -3.0), ("is", -3.5)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words and no decoder: what tiny models are tested with."""
    words = ["<unk>", "<s>", "user", "assistant", "hello", "Paris", "is", "nice"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<s>", unk_token="<unk>")


ALL_TOKENIZERS = [qwen_tokenizer, chatml_tokenizer, llama_tokenizer, unigram_tokenizer, word_tokenizer]


def _byte_level_backend(special_tokens: Sequence[str] = ()) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


# --- conversations ---


def user(text: str) -> Message:
    return Message(Role.USER, (TextPart(text),))


def system(text: str) -> Message:
    return Message(Role.SYSTEM, (TextPart(text),))


def assistant(text: str | None, *calls: ToolCall, reasoning: str | None = None) -> Message:
    content = None if text is None else (TextPart(text),)
    return Message(Role.ASSISTANT, content, reasoning=reasoning, tool_calls=calls)


def result(call_id: str, text: str) -> Message:
    return Message(Role.TOOL, (TextPart(text),), tool_call_id=call_id)


def tool(name: str = "get_weather", description: str = "Get the weather.") -> Tool:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": function})


def oracle_ids(
    tokenizer: PreTrainedTokenizerFast,
    source: str,
    conversation: Conversation,
    *,
    arguments_as_text: bool = False,
    **variables,
) -> list[int]:
    """What transformers itself makes of the conversation."""
    return tokenizer.apply_chat_template(
        hf_messages(conversation, arguments_as_text=arguments_as_text),
        tools=[item.declared for item in conversation.tools] or None,
        chat_template=source,
        add_generation_prompt=True,
        return_dict=False,
        **variables,
    )


def hf_messages(conversation: Conversation, *, arguments_as_text: bool = False) -> list[dict[str, object]]:
    names = {call.id: call.name for message in conversation.messages for call in message.tool_calls}
    return [_as_hf(message, names, arguments_as_text) for message in conversation.messages]


def _as_hf(message: Message, names: Mapping[str, str], arguments_as_text: bool) -> dict[str, object]:
    fields: dict[str, object] = {"role": message.role.value, "content": message.text}
    if message.content is None:
        fields["content"] = None
    if message.reasoning is not None:
        fields |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [_call_as_hf(call, arguments_as_text) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields |= {"tool_call_id": message.tool_call_id, "name": names.get(message.tool_call_id)}
    return fields


def _call_as_hf(call: ToolCall, arguments_as_text: bool) -> dict[str, object]:
    arguments = call.arguments if arguments_as_text else json.loads(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


# --- replies ---


def pieces_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[Piece]:
    """A reply's pieces, one token a time, markers in `text` being markers."""
    detokenizer = token_table(tokenizer).detokenizer([0])
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return [piece for token_id in ids for piece in detokenizer.feed([token_id])] + detokenizer.flush()


def parse(
    renderer: Renderer,
    chunks: Iterable[Sequence[Piece]],
    end: ReplyEnd,
    prefill: str = "",
    tools: Sequence[Tool] | None = None,
) -> "Parsed":
    """`tools`: those declared; by default the function f."""
    parser = renderer.parser(RenderedPrompt((), prefill), (tool("f"),) if tools is None else tools)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)] + parser.finish(end)
    return Parsed(deltas, malformed=parser.malformed, raw_text=parser.raw_text)


class Parsed:
    """A reply's deltas joined by kind."""

    def __init__(self, deltas: Sequence[Delta], *, malformed: bool, raw_text: str) -> None:
        self.reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        self.text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        self.ids = [delta.call.id for delta in deltas if isinstance(delta, ToolCallDelta)]
        self.calls = [(delta.call.name, delta.call.arguments) for delta in deltas if isinstance(delta, ToolCallDelta)]
        self.malformed = malformed
        self.raw_text = raw_text
        self.fields = (self.reasoning, self.text, self.calls, malformed, raw_text)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same reply in the longest pieces."""
    runs: list[Piece] = []
    for piece in pieces:
        if runs and runs[-1].token_id is None and piece.token_id is None:
            runs[-1] = Piece(runs[-1].text + piece.text)
        else:
            runs.append(piece)
    return runs


def characters(piece: Piece) -> list[Piece]:
    """The same text in the shortest pieces."""
    return [piece] if piece.token_id is not None else [Piece(char) for char in piece.text]
