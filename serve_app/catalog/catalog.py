"""The catalogue: resolves the request field `model`, for one caller, to the base model, its context length and the
adapter.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

from engines.interface.protocol import Adapter
from renderers.base import Renderer
from serve_app.access.auth import Caller
from serve_app.base.errors import CheckpointUnavailable, InvalidRequest, ModelNotFound, NoReplica
from serve_app.base.explain import near
from serve_app.base.model_id import BaseModelId, CheckpointPath, parse
from serve_app.catalog.checkpoint_templates import OwnTemplates
from serve_app.catalog.loading import Entry, Loading
from serve_app.catalog.served_model import ServedModel
from serve_app.config.checking.base_names import BaseNames


class ResolvedCheckpoint(Protocol):
    """A verified checkpoint in a local directory (`checkpoints/checkpoint.py`)."""

    @property
    def digest(self) -> str: ...

    @property
    def directory(self) -> str: ...

    @property
    def base_model(self) -> str | None: ...

    @property
    def chat_template(self) -> str | None: ...


class ListedCheckpoint(Protocol):
    """What a listing says about a checkpoint, without reading its weights (`checkpoints/listing.py`)."""

    @property
    def path(self) -> CheckpointPath: ...

    @property
    def changed_at(self) -> float: ...

    @property
    def base_model(self) -> str | None: ...

    @property
    def problem(self) -> str | None: ...

    @property
    def digest(self) -> str | None: ...

    @property
    def is_here(self) -> bool: ...


class Listing(Protocol):
    """Checkpoints that an owner may use, newest first. `next`: what to ask for the next page with, None on the last
    one. `is_complete`: the pages hold all of them.
    """

    @property
    def checkpoints(self) -> Sequence[ListedCheckpoint]: ...

    @property
    def next(self) -> str | None: ...

    @property
    def is_complete(self) -> bool: ...


class Checkpoints(Protocol):
    """Where checkpoints come from."""

    async def resolve_for(self, path: CheckpointPath, caller: str | None, who: str) -> ResolvedCheckpoint:
        """The content that the path has now, for the owner `caller` and the key `who`. Raises a `CheckpointError`;
        another owner's private checkpoint counts as not found.
        """

    def keep(self, adapter: Adapter) -> AbstractAsyncContextManager[None]:
        """Keep the adapter's files for as long as the context lasts. Raises `AdapterChanged` when they are gone."""

    async def list(self, owner: str | None, after: str | None = None) -> Listing:
        """The checkpoints that this owner may use. `after`: `next` of the page before. Raises `InvalidRequest`."""

    def close(self) -> None:
        """Release everything; no call may follow."""


@dataclass(frozen=True, slots=True)
class CheckpointPage:
    """`next`: what to ask for the next page with. `has_more`: there is one, or some checkpoints could not be listed."""

    checkpoints: Sequence[ListedCheckpoint]
    next: str | None = None
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model and adapter that a request runs on. The reply's `model` repeats `requested`."""

    requested: str
    model: ServedModel
    context_length: int
    renderer: Renderer | None
    adapter: Adapter | None = None
    checkpoint: CheckpointPath | None = None

    @property
    def deployment(self) -> str:
        return self.model.config.app

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's own end tokens; they always stop a reply."""
        return self.model.end_token_ids | (self.renderer.stop_token_ids if self.renderer else frozenset())


_UNKNOWN_CONTEXT: Final = 1 << 20  # of a model that is being loaded; the prompt is measured again afterwards

_Chosen = tuple[Entry, int | None]
"""A model, and the context length of the variant that is asked for."""


class Catalog:
    """The models by id: loaded or being loaded. Without a store (`checkpoints` None) no checkpoint can be looked up."""

    def __init__(self, entries: Mapping[str, Entry], checkpoints: Checkpoints | None) -> None:
        self.entries = entries
        self.models = {name: entry for name, entry in entries.items() if isinstance(entry, ServedModel)}
        self.checkpoints = checkpoints
        self._base_names = BaseNames([entry.config for entry in entries.values()])
        self._own_templates = OwnTemplates()

    @property
    def longest_context(self) -> int:
        """Of all models and variants, in tokens."""
        return max((length for entry in self.entries.values() for length in _context_lengths(entry)), default=0)

    @property
    def apps(self) -> Mapping[str, str]:
        """The application of each model."""
        return {name: entry.config.app for name, entry in self.entries.items()}

    async def visible_to(self, caller: Caller) -> list[ServedModel]:
        """The models that the caller may use, without those that take too long to load."""
        entries = [entry for entry in self.entries.values() if _may_use(caller, entry)]
        found = await asyncio.gather(*map(_in_time, entries))
        return [model for model in found if model is not None]

    async def checkpoints_of(self, caller: Caller, after: str | None) -> CheckpointPage:
        """A page of the checkpoints that the caller may use."""
        if self.checkpoints is None:
            return CheckpointPage([], next=None, has_more=True)
        listing = await self.checkpoints.list(caller.owner, after)
        mine = [checkpoint for checkpoint in listing.checkpoints if self._may_sample(caller, checkpoint.base_model)]
        return CheckpointPage(mine, listing.next, listing.next is not None or not listing.is_complete)

    def base_id(self, trained_on: str | None) -> str | None:
        """The id of the served model that a checkpoint names as its base; None when it names none."""
        return None if trained_on is None else next((entry.config.id for entry in self._meant_by(trained_on)), None)

    def deployment_of(self, trained_on: str | None) -> str | None:
        """Where checkpoints run that name this base; None when they name none."""
        return None if trained_on is None else next((model.config.app for model in self._meant_by(trained_on)), None)

    def _may_sample(self, caller: Caller, trained_on: str | None) -> bool:
        """Whether a checkpoint that was trained on this base can be sampled. One that names no base can, on a base that
        the request names.
        """
        return trained_on is None or any(_may_use(caller, model) for model in self._meant_by(trained_on))

    async def resolve(self, requested: str, caller: Caller) -> ResolvedModel:
        """Raises `InvalidRequest`, `ModelNotFound` or a `CheckpointError`."""
        model_id = parse(requested)
        named = None if model_id.base is None else self._base(model_id.base, caller)
        if model_id.checkpoint is None:
            assert named is not None
            model, context_length = await _loaded(named)
            return ResolvedModel(requested, model, context_length, model.renderer)
        checkpoint = await self._checkpoint(model_id.checkpoint, caller)
        model, context_length = await _loaded(self._base_of(model_id.checkpoint, checkpoint, named, caller))
        adapter = Adapter(checkpoint.digest, str(checkpoint.directory))
        renderer = await self._renderer(model, checkpoint)
        return ResolvedModel(requested, model, context_length, renderer, adapter, model_id.checkpoint)

    def keep(self, target: ResolvedModel) -> AbstractAsyncContextManager[None]:
        """Keep the files that the target needs, for as long as the context lasts. Raises `AdapterChanged`."""
        if target.adapter is None or self.checkpoints is None:
            return nullcontext()
        return self.checkpoints.keep(target.adapter)

    def _base(self, base: BaseModelId, caller: Caller) -> _Chosen:
        entry = self.entries.get(base.name)
        if entry is not None and _may_use(caller, entry):
            if base.variant is None:
                return entry, None
            context_length = entry.config.variants.get(base.variant)
            if context_length is not None:
                return entry, context_length
        raise _not_found(str(base), near(str(base), map(str, self._names_for(caller))))

    def _names_for(self, caller: Caller) -> Iterator[BaseModelId]:
        for name, entry in self.entries.items():
            if _may_use(caller, entry):
                yield BaseModelId(name)
                yield from (BaseModelId(name, variant) for variant in entry.config.variants)

    async def _checkpoint(self, path: CheckpointPath, caller: Caller) -> ResolvedCheckpoint:
        if self.checkpoints is None:
            raise CheckpointUnavailable("No checkpoint can be served: the store's configuration was refused.")
        return await self.checkpoints.resolve_for(path, caller.owner, caller.name)

    def _meant_by(self, name: str) -> list[Entry]:
        """The models that a checkpoint may mean by this base name, the most likely first."""
        return [self.entries[config.id] for config in self._base_names.meant_by(name)]

    def _base_of(
        self,
        path: CheckpointPath,
        checkpoint: ResolvedCheckpoint,
        named: _Chosen | None,
        caller: Caller,
    ) -> _Chosen:
        trained_on = checkpoint.base_model
        if trained_on is None:
            if named is None:
                raise InvalidRequest(
                    f"The checkpoint {path} does not name its base model: use '<base>;{path}'.", "model"
                )
            return named
        meant = self._meant_by(trained_on)
        usable = [entry for entry in meant if _may_use(caller, entry)]
        if meant and not usable:
            raise _not_found(str(path))  # not shown: this caller may not use the model that it was trained on
        if named is not None:
            if named[0] not in meant:
                remedy = "" if meant else f" {_NAME_THE_BASE}"
                sentence = (
                    f"The checkpoint {path} was trained on {trained_on!r}, not on {named[0].config.id!r}.{remedy}"
                )
                raise InvalidRequest(sentence, "model")
            return named
        if not meant:
            sentence = f"The base {trained_on!r} of the checkpoint {path} is not served. {_NAME_THE_BASE}"
            raise ModelNotFound(sentence, "model")
        if len({entry.config.weights for entry in meant}) > 1:
            ids = " or ".join(repr(entry.config.id) for entry in usable)
            sentence = f"The base {trained_on!r} of the checkpoint {path} may be {ids}: use '<base>;{path}'."
            raise InvalidRequest(sentence, "model")
        variant = trained_on.partition(":")[2]
        return usable[0], usable[0].config.variants.get(variant)

    async def _renderer(self, model: ServedModel, checkpoint: ResolvedCheckpoint) -> Renderer | None:
        """The renderer, with the checkpoint's own template where the catalogue allows one."""
        template = checkpoint.chat_template
        if template is None or not model.config.allow_checkpoint_chat_template:
            return model.renderer
        return await self._own_templates.renderer(model, template)


_NAME_THE_BASE = (
    'Write the id of the served model as "base_model" into its checkpoint.json, '
    "or its name for the base into also_known_as of that model in config.yaml."
)


def _may_use(caller: Caller, entry: Entry) -> bool:
    return caller.models is None or entry.config.id in caller.models


def _context_lengths(entry: Entry) -> tuple[int, ...]:
    if isinstance(entry, ServedModel):
        return entry.context_lengths
    return (entry.config.context_length or _UNKNOWN_CONTEXT, *entry.config.variants.values())


async def _loaded(chosen: _Chosen) -> tuple[ServedModel, int]:
    """With the context length. Waits for a model that is being loaded. Raises `NoReplica` after too long, or
    `ModelNotFound` if it cannot be loaded.
    """
    entry, context_length = chosen
    model = await entry.wait() if isinstance(entry, Loading) else entry
    if model is None:
        raise _not_found(entry.config.id)
    return model, context_length or model.context_length


async def _in_time(entry: Entry) -> ServedModel | None:
    try:
        return await entry.wait() if isinstance(entry, Loading) else entry
    except NoReplica:
        return None


def _not_found(name: str, hint: str = "") -> ModelNotFound:
    return ModelNotFound(f"The model {name!r} does not exist, or this key may not use it.{hint}", "model")
