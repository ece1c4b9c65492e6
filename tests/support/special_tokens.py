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


@cache
def gpt_oss_tokenizer() -> PreTrainedTokenizerFast:
    return placed_tokenizer(GPT_OSS, eos="<|return|>")


def placed_tokenizer(special: Mapping[str, int], *, eos: str) -> PreTrainedTokenizerFast:
    """Another family's byte-level BPE with these tokens. Between its own ids and theirs there are none."""
    state = json.loads(qwen_tokenizer().backend_tokenizer.to_str())
    state["added_tokens"] = []
    state["model"]["vocab"] |= special
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
