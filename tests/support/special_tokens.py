"""Tokenizers with the special tokens of a family at the places that they have in its models."""

import json
from collections.abc import Mapping
from functools import cache

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.support.renderer_kit import qwen_tokenizer

GPT_OSS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}

INKLING = {
    "<|endoftext|>": 199999,
    "<|message_user|>": 200000,
    "<|message_model|>": 200001,
    "<|message_system|>": 200002,
    "<|message_tool|>": 200003,
    "<|content_text|>": 200004,
    "<|content_image|>": 200005,
    "<|content_model_end_sampling|>": 200006,
    "<|content_thinking|>": 200008,
    "<|end_message|>": 200010,
    "<|content_tool_error|>": 200022,
    "<|content_xml|>": 200024,
    "<|content_invoke_tool_json|>": 200049,
    "<|content_invoke_tool_text|>": 200057,
}


@cache
def gpt_oss_tokenizer() -> PreTrainedTokenizerFast:
    return placed_tokenizer(GPT_OSS, eos="<|return|>")


@cache
def inkling_tokenizer() -> PreTrainedTokenizerFast:
    return placed_tokenizer(INKLING, eos="<|content_model_end_sampling|>")


def placed_tokenizer(special: Mapping[str, int], *, eos: str) -> PreTrainedTokenizerFast:
    """Another family's byte-level BPE with these tokens. Between its own ids and theirs there are none."""
    state = json.loads(qwen_tokenizer().backend_tokenizer.to_str())
    state["added_tokens"] = []
    state["model"]["vocab"] |= special
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
