"""Names of the tensors in an adapter's file, and which of the model's modules they mean."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from engines.lora.format.targets import LoraTargets

_PREFIX: Final = "base_model.model."


class Role(StrEnum):
    """What a tensor is to its module. BASE: a copy of the base model's own vocabulary matrix."""

    A = "lora_A"
    B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    BASE = "base_layer"


_SUFFIXES: Final = (
    (".lora_A.weight", Role.A),
    (".lora_B.weight", Role.B),
    (".lora_embedding_A", Role.EMBEDDING_A),
    (".lora_embedding_B", Role.EMBEDDING_B),
    (".base_layer.weight", Role.BASE),
)
_VOCABULARY_MODULES: Final = frozenset({"embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "embeddings"})


@dataclass(frozen=True, slots=True)
class TensorName:
    """`path`: the module's path, without PEFT's prefix. `depth`: how many wrappers PEFT nested around the module
    outside the wrapper of this tensor.
    """

    path: str
    role: Role
    depth: int = 0


def parse_name(name: str) -> TensorName | None:
    """None when this is not a tensor of a LoRA adapter. Module names are printable ASCII."""
    if not (name.isascii() and name.isprintable()):
        return None
    path = name.removeprefix(_PREFIX)
    for suffix, role in _SUFFIXES:
        if path.endswith(suffix):
            path = path.removesuffix(suffix)
            module = path
            while module.endswith(".base_layer"):
                module = module.removesuffix(".base_layer")
            return TensorName(module, role, (len(path) - len(module)) // len(".base_layer"))
    # PEFT saves the whole vocabulary matrices under their plain names when it takes the vocabulary for resized.
    module = path.removesuffix(".weight")
    is_vocabulary = module != path and module.rpartition(".")[2] in _VOCABULARY_MODULES
    return TensorName(module, Role.BASE) if is_vocabulary else None


# Where the layers of the language model are, in the versions of transformers and in other exporters' files.
_STEMS: Final = (
    "model.language_model.model.", "model.language_model.", "language_model.model.", "language_model.",
    "model.text_model.", "model.llm.", "backbone.", "model.", "",
)  # fmt: skip
_SEGMENTS: Final = {
    "attn": "self_attn", "block_sparse_moe": "mlp",
    "wq_du": "q_proj", "wk_dv": "k_proj", "wv_dv": "v_proj", "wr_du": "r_proj", "wo_ud": "o_proj",
}  # fmt: skip
_HEADS: Final = frozenset({"lm_head", "unembed_tokens", "unembed"})


class Resolver:
    """From paths in a file to paths of the model; the same path always gives the same answer."""

    def __init__(self, targets: LoraTargets) -> None:
        self._known = frozenset((*targets.targets, *targets.parts, *targets.experts))
        self._head = targets.head

    def resolve(self, path: str) -> str | None:
        """A key of the targets, parts or experts. None when there is none, or the path could mean more than one."""
        for spelling in _spellings(path):
            if spelling in self._known:
                return spelling
        for spelling in _spellings(path):
            core = spelling.removeprefix(next(stem for stem in _STEMS if spelling.startswith(stem)))
            hits = {stem + core for stem in _STEMS} & self._known
            if hits:
                return hits.pop() if len(hits) == 1 else None
        return self._head if path.rpartition(".")[2] in _HEADS else None


def _spellings(path: str) -> Iterator[str]:
    yield path
    yield ".".join(_SEGMENTS.get(segment, segment) for segment in path.split("."))
