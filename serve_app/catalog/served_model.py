"""One base model as the ingress sees it: tokenizer, renderer, limits. Loading takes seconds, so it must not run on the
event loop.
"""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from renderers import registry
from renderers.base import Renderer
from renderers.replies.detokenize import DecoderUnknown, TokenTable, token_table
from serve_app.base.errors import ConfigRefused
from serve_app.base.model_files import read_json
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.paths import resolve_source

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

_IMPORTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`renderer` None: the model has no chat template, so it takes no chats. `end_token_ids` always end a reply,
    as do those of the renderer. `takes_images`: it has a vision tower.
    """

    config: ModelConfig
    tokenizer: "PreTrainedTokenizerBase"
    table: TokenTable
    renderer: Renderer | None
    context_length: int
    vocab_size: int
    end_token_ids: frozenset[int]
    created: int
    takes_images: bool = False

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """The model's own and those of its variants, in tokens."""
        return (self.context_length, *self.config.variants.values())

    def under(self, config: ModelConfig) -> "ServedModel | None":
        """The same model under another entry of the catalogue; None if that one needs another loading."""
        if config == self.config:
            return self
        return replace(self, config=config) if config.loaded_by == self.config.loaded_by else None

    def renderer_with(self, chat_template: str) -> Renderer:
        """A renderer of the same family with another template. Takes up to 200 ms, or seconds for a hostile template.
        Raises `TemplateRefused`.
        """
        return registry.build(self.config.renderer, self.tokenizer, chat_template, max_tokens=max(self.context_lengths))


def load_model(config: ModelConfig, before: ServedModel | None = None) -> ServedModel:
    """`before`: the model under its last entry, whose tokenizer is taken if it is the same. Raises `ConfigRefused` with
    one sentence.
    """
    source = resolve_source(config.source)
    if source.startswith("/") and not Path(source).exists():
        raise ConfigRefused(f"The source of the model {config.id!r} does not exist: {source!r}.")
    known = before if before is not None and before.config.weights == config.weights else None
    tokenizer = _load_tokenizer(config, source) if known is None else known.tokenizer
    facts = read_json(source, "config.json", config.revision)
    takes_images = isinstance(facts.get("vision_config"), dict)
    facts = {**facts, **facts.get("text_config", {})}
    context_length = _context_length(config, source, facts.get("max_position_embeddings"))
    return ServedModel(
        config=config,
        tokenizer=tokenizer,
        table=_token_table(config, tokenizer) if known is None else known.table,
        renderer=_build_renderer(config, tokenizer, max(context_length, *config.variants.values(), 0)),
        context_length=context_length,
        vocab_size=max(len(tokenizer), int(facts.get("vocab_size") or 0)),
        end_token_ids=_end_token_ids(tokenizer, config, source),
        created=int(time.time()),
        takes_images=takes_images,
    )


def _context_length(config: ModelConfig, source: str, most: object) -> int:
    """`most`: the length that the model's config allows, if it names one; engines refuse longer ones."""
    context_length = config.context_length or most
    if not isinstance(context_length, int):
        raise ConfigRefused(f"The model {config.id!r} needs context_length: {source!r} does not name one.")
    lengths = {config.id: context_length, **{f"{config.id}:{name}": n for name, n in config.variants.items()}}
    for name, length in lengths.items():
        if isinstance(most, int) and length > most:
            raise ConfigRefused(
                f"The context_length of {name!r} must be at most {most}, the max_position_embeddings of {source!r}, "
                f"got {length}."
            )
    return context_length


def _auto_tokenizer() -> "type[AutoTokenizer]":
    """transformers replaces its own modules while they are being imported: another thread that imports them meanwhile
    gets what was replaced, and fails.
    """
    with _IMPORTING:
        # Imported here: it takes seconds, and most of what imports the catalogue never loads a model.
        from transformers import AutoTokenizer

        found: type[AutoTokenizer] = AutoTokenizer
        return found


def _load_tokenizer(config: ModelConfig, source: str) -> "PreTrainedTokenizerBase":
    auto_tokenizer, path = _auto_tokenizer(), Path(source)
    folder, options = source, {"revision": config.revision or "main"}
    if path.suffix == ".gguf":
        folder, options = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = auto_tokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as exc:
        _refuse_code(config, folder)
        raise ConfigRefused(f"The tokenizer of the model {config.id!r} cannot be loaded from {source!r}.") from exc
    if not tokenizer.is_fast:
        raise ConfigRefused(f"The tokenizer of the model {config.id!r} must be a fast tokenizer (tokenizer.json).")
    # Some are saved with settings for training; requests are never cut or padded.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _refuse_code(config: ModelConfig, folder: str) -> None:
    """For a tokenizer that did not load. Raises `ConfigRefused` if code of the model would make it."""
    if "auto_map" in read_json(folder, "tokenizer_config.json", config.revision):
        raise ConfigRefused(
            f"The tokenizer of the model {config.id!r} needs Python code that comes with the model (auto_map in "
            f"tokenizer_config.json of {folder!r}). No such code is run for a tokenizer: give it a tokenizer.json and "
            "remove auto_map."
        )


def _token_table(config: ModelConfig, tokenizer: "PreTrainedTokenizerBase") -> TokenTable:
    try:
        return token_table(tokenizer)
    except DecoderUnknown as exc:
        raise ConfigRefused(f"The tokenizer of the model {config.id!r} cannot be served: {exc}") from exc


def _build_renderer(config: ModelConfig, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> Renderer | None:
    """`max_tokens`: of the longest prompt that the renderer encodes as a whole."""
    try:
        return registry.build(config.renderer, tokenizer, None, max_tokens=max_tokens)
    except ValueError as exc:
        raise ConfigRefused(f"The model {config.id!r} cannot have the renderer {config.renderer!r}: {exc}") from exc


def _end_token_ids(tokenizer: "PreTrainedTokenizerBase", config: ModelConfig, source: str) -> frozenset[int]:
    """The tokenizer's end token, and those that the model's generation settings add."""
    told = read_json(source, "generation_config.json", config.revision).get("eos_token_id")
    ids = told if isinstance(told, list) else [told]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if isinstance(i, int))
