"""The grammar of the request field `model`; `parse` and `str` are inverses.

model      = base | checkpoint | base ";" checkpoint
base       = name [":" variant]                      the catalogue knows names and variants
checkpoint = "tinker://" run "/sampler_weights/" name
"""

import re
from dataclasses import dataclass

from serve_app.base.errors import InvalidRequest

_SCHEME = "tinker://"
_KIND = "sampler_weights"
MAX_CHARACTERS = 1024
_MAX_PART_CHARACTERS = 255  # the longest file name of common file systems
_PART = re.compile(r"[A-Za-z0-9._:-]+")


@dataclass(frozen=True, slots=True)
class BaseModelId:
    """A base model of the catalogue; `variant` names another context length of it."""

    name: str
    variant: str | None = None

    def __str__(self) -> str:
        return self.name if self.variant is None else f"{self.name}:{self.variant}"


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A checkpoint saved for sampling: two names without separators, safe as parts of a file path."""

    run: str
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.run}/{_KIND}/{self.name}"


@dataclass(frozen=True, slots=True)
class ModelId:
    """The model that a caller requests. At least one of the two is set."""

    base: BaseModelId | None = None
    checkpoint: CheckpointPath | None = None

    def __str__(self) -> str:
        return ";".join(str(part) for part in (self.base, self.checkpoint) if part is not None)


def names_checkpoint(text: str) -> bool:
    """Whether the text, if it is a model id, names a checkpoint."""
    return _SCHEME in text


def parse(text: str) -> ModelId:
    """Raises `InvalidRequest` (param `model`) that says what is malformed."""
    if not text or len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"model must have 1 to {MAX_CHARACTERS} characters, got {len(text)}.", "model")
    # Look for the scheme first: run ids contain colons, and a base id must not include the checkpoint's path.
    if text.startswith(_SCHEME):
        return ModelId(checkpoint=parse_checkpoint_path(text))
    base, separator, path = text.partition(";")
    if not base:
        raise InvalidRequest(f"model has no base model before ';': {text!r}.", "model")
    return ModelId(_parse_base(base), parse_checkpoint_path(path) if separator else None)


def parse_checkpoint_path(text: str) -> CheckpointPath:
    """Raises `InvalidRequest` (param `model`)."""
    if not text.startswith(_SCHEME):
        raise _malformed(text, f"it must start with {_SCHEME!r}")
    parts = text.removeprefix(_SCHEME).split("/")
    if len(parts) != 3:
        raise _malformed(text, f"it must have the three parts run/{_KIND}/name, got {len(parts)}")
    run, kind, name = parts
    for what, part in (("run", run), ("name", name)):
        if not _PART.fullmatch(part) or set(part) == {"."} or len(part) > _MAX_PART_CHARACTERS:
            raise _malformed(
                text, f"its {what} must be 1 to {_MAX_PART_CHARACTERS} letters, digits and '._:-', got {part!r}"
            )
    if kind != _KIND:
        raise _malformed(text, f"only checkpoints of the type {_KIND!r} can be sampled, got {kind!r}")
    return CheckpointPath(run, name)


def _parse_base(text: str) -> BaseModelId:
    name, separator, variant = text.partition(":")
    return BaseModelId(name, variant if separator else None)


def _malformed(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"model holds a malformed checkpoint path {text!r}: {why}.", "model")
