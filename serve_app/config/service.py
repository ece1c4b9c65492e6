"""The `user_config` of the ingress in config.yaml: what it serves. It can change while the ingress runs.

Each key, model and slug, the limits and the checkpoints are read separately: an error in one does not affect the
others.
`OPTIONS.md` lists every option.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from annotated_types import Ge
from pydantic import Field, ValidationError
from typing_extensions import Doc

from serve_app.base.errors import ConfigRefused
from serve_app.base.explain import path_of, show
from serve_app.base.model_id import parse
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.checking.base_names import clashes
from serve_app.config.checking.refusal import Location, Refusal, refusals
from serve_app.config.checking.section import Bytes, Count, Seconds, Section, Text
from serve_app.config.keys import BUDGETS, KeyConfig, KeyLimits, PerKeyLimits
from serve_app.config.ledger import LedgerConfig
from serve_app.config.marketplace import MarketplaceConfig, SlugConfig

_S = TypeVar("_S", bound=Section)
_Last = TypeVar("_Last", bound=Section | None)


class CheckpointsConfig(Section):
    """The checkpoint roots, and the bounded local cache of remote checkpoints."""

    roots: Annotated[
        tuple[Text, ...],
        Field(strict=False),
        Doc("Folders and URLs in which `tinker://` paths are looked up, in order."),
    ] = ()
    cache_directory: Annotated[
        Text | None,
        Doc(
            "Folder for copies of remote checkpoints and tar files, which the models read there, and for the digests "
            "of all checkpoints. null: a folder under the user's cache."
        ),
    ] = None
    cache_bytes: Annotated[int, Ge(0), Doc("Largest size of that folder.")] = 50 * 2**30


class LimitsConfig(Section):
    """Limits on requests, which bound the work that a caller can cause."""

    body_bytes: Annotated[Count, Doc("Largest request body; a larger one is refused (413).")] = 8 * 2**20
    bytes_in_flight: Annotated[
        Bytes, Doc("Memory that the requests under way in an ingress may hold; more are refused (503).")
    ] = 256 * 2**20
    body_timeout_s: Annotated[Seconds, Doc("Longest time for a request body to arrive; then 400.")] = 30.0
    messages: Annotated[Count, Doc("Most messages of a request.")] = 4096
    tools: Annotated[Count, Doc("Most tools of a request.")] = 512
    stop_sequences: Annotated[Count, Doc("Most stop strings of a request.")] = 256
    stop_characters: Annotated[Count, Doc("Most characters of one stop string.")] = 1024
    logit_bias_entries: Annotated[Count, Doc("Most entries of `logit_bias`.")] = 1024
    images: Annotated[Count, Doc("Most images of a request.")] = 16
    image_bytes: Annotated[Count, Doc("Most bytes of an image file; `body_bytes` bounds a data URL too.")] = 20 * 2**20
    image_tensor_bytes: Annotated[
        Count, Doc("Most bytes of all prepared images of a request; they travel to the model in one message.")
    ] = 192 * 2**20
    image_pixels: Annotated[Count, Doc("Most pixels of an image, checked before it is decoded.")] = 32 * 2**20
    image_side: Annotated[Count, Doc("Most pixels of the longer side of an image.")] = 16_384
    first_token_timeout_s: Annotated[Seconds, Doc("Longest wait for the first token; then 503.")] = 120.0
    total_timeout_s: Annotated[Seconds, Doc("Longest request; then 503, or an error event in a stream.")] = 3600.0
    per_key: Annotated[PerKeyLimits, Doc("Limits of each key, over all ingresses unless it says otherwise.")] = (
        PerKeyLimits()
    )


class ImagesConfig(Section):
    """The application that prepares images for vision models."""

    app: Annotated[Text, Doc("The application of this file that prepares images.")]
    timeout_s: Annotated[
        Seconds, Doc("Longest time to prepare the images of a request, including the start of a process.")
    ] = 60.0


class ServiceConfig(Section):
    """All of it."""

    models: Annotated[
        tuple[ModelConfig, ...], Field(strict=False), Doc("The base models; at least one, unless there are slugs.")
    ]
    checkpoints: Annotated[CheckpointsConfig, Doc("Where checkpoints are stored.")] = CheckpointsConfig()
    images: Annotated[ImagesConfig | None, Doc("Where images are prepared; null: they are refused.")] = None
    keys: Annotated[
        tuple[KeyConfig, ...], Field(strict=False), Doc("Accepted API keys; without one every request is refused.")
    ] = ()
    limits: Annotated[LimitsConfig, Doc("Limits on requests.")] = LimitsConfig()
    marketplace: Annotated[MarketplaceConfig, Doc("Names that have several endpoints.")] = MarketplaceConfig()
    ledger: Annotated[
        LedgerConfig | None, Doc("Where usage is recorded; null: nowhere, and no key may have a budget.")
    ] = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The valid parts of a `user_config`. A refused part keeps its previous value, except keys: a key that the new
    configuration does not accept is no longer valid.
    """

    config: ServiceConfig
    refusals: tuple[Refusal, ...]


def read_config(raw: object, before: ServiceConfig | None = None) -> Reading:
    """`before`: the configuration in force."""
    last = before or _NOTHING
    if not isinstance(raw, dict):
        return Reading(last, (Refusal("", f"The configuration must be an object, got {show(raw)}."),))
    found = _unknown_sections(raw)
    # An unknown name may be a misspelt section: sections that are missing beside it keep their values.
    given = {**{name: getattr(last, name) for name in _SECTIONS if found}, **raw}
    reader = _Reader(last, found)
    slugs = given.get("marketplace", {})
    models = () if not given.get("models") and _has_slugs(slugs) else reader.models(given.get("models"))
    ledger = reader.ledger(given.get("ledger"), last.ledger)  # before keys and limits, which may need it
    config = ServiceConfig(
        models=models,
        marketplace=reader.marketplace(slugs, last.marketplace, models),
        checkpoints=reader.section("checkpoints", given.get("checkpoints", {}), CheckpointsConfig, last.checkpoints),
        images=reader.images(given.get("images"), last.images),
        keys=reader.keys(given.get("keys", ())),
        limits=reader.limits(given.get("limits", {}), last.limits),
        ledger=ledger,
    )
    return Reading(config, tuple(found))


def parse_config(raw: object) -> ServiceConfig:
    """Raises `ConfigRefused` with one sentence for each error."""
    reading = read_config(raw)
    if reading.refusals:
        raise ConfigRefused("\n".join(map(str, reading.refusals)))
    return reading.config


_NOTHING: Final = ServiceConfig(models=())
_SECTIONS: Final = tuple(ServiceConfig.model_fields)


def _unknown_sections(raw: Mapping[str, object]) -> list[Refusal]:
    try:
        ServiceConfig.model_validate({"models": (), **{name: None for name in raw if name not in _SECTIONS}})
    except ValidationError as exc:
        return refusals(exc, ServiceConfig, "")
    return []


class _Reader:
    """Reads sections one by one; collects the errors in `found`."""

    def __init__(self, last: ServiceConfig, found: list[Refusal]) -> None:
        self._last = last
        self._found = found
        self._ids = {*(model.id for model in last.models), *(slug.id for slug in last.marketplace.slugs)}
        self._model_ids = {model.id for model in last.models}
        self._has_ledger = False

    def section(self, name: str, raw: object, kind: type[_S], last: _Last) -> _S | _Last:
        return self._read(raw, kind, (name,)) or last

    def images(self, raw: object, last: ImagesConfig | None) -> ImagesConfig | None:
        return None if raw is None else self.section("images", raw, ImagesConfig, last)

    def ledger(self, raw: object, last: LedgerConfig | None) -> LedgerConfig | None:
        found = None if raw is None else self.section("ledger", raw, LedgerConfig, last)
        self._has_ledger = found is not None
        return found

    def limits(self, raw: object, last: LimitsConfig) -> LimitsConfig:
        found = self.section("limits", raw, LimitsConfig, last)
        if self._is_countable(found.per_key, "limits.per_key"):
            return found
        return LimitsConfig() if _budget_of(last.per_key) else last

    def _is_countable(self, limits: KeyLimits, path: str) -> bool:
        """Whether a ledger counts the budget among these limits; refuses them if not."""
        name = None if self._has_ledger else _budget_of(limits)
        if name is not None:
            self._refuse(f"{path}.{name}", "needs a ledger")
        return name is None

    def models(self, raw: object) -> tuple[ModelConfig, ...]:
        """A refused model keeps its previous configuration, if it had one."""
        last = {model.id: model for model in self._last.models}
        if raw is None or not isinstance(raw, list | tuple) or not raw:
            self._found.append(_no_list("models", raw))
            return self._last.models
        models: dict[int, ModelConfig] = {}
        for index, entry in enumerate(raw):
            self._ids.add(model_id := _id_of(entry))
            model = self._model(entry, index, {model.id for model in models.values()}) or last.get(model_id)
            if model is not None and model.id not in {model.id for model in models.values()}:
                models[index] = model
        while clash := next(clashes(models), None):
            self._found.append(clash.refusal)
            replaced = models.pop(clash.index)
            if (other := last.get(replaced.id, replaced)) != replaced:
                models[clash.index] = other
        return tuple(models[index] for index in sorted(models))

    def marketplace(self, raw: object, last: MarketplaceConfig, models: Sequence[ModelConfig]) -> MarketplaceConfig:
        """A refused slug keeps its previous configuration, if it had one, unless a model has its id now."""
        raw = {"slugs": raw.slugs} if isinstance(raw, MarketplaceConfig) else raw
        slugs = raw.get("slugs", ()) if isinstance(raw, dict) else ()
        empty = {**raw, "slugs": ()} if isinstance(raw, dict) else raw
        if self._read(empty, MarketplaceConfig, ("marketplace",)) is None:
            return last
        if not isinstance(slugs, list | tuple):
            self._found.append(_no_list("marketplace.slugs", slugs))
            return last
        before = {slug.id: slug for slug in last.slugs}
        model_ids = frozenset(model.id for model in models)
        chosen: dict[str, SlugConfig] = {}
        for index, entry in enumerate(slugs):
            self._ids.add(slug_id := _id_of(entry))
            slug = self._slug(entry, index, model_ids, chosen) or before.get(slug_id)
            if slug is not None and slug.id not in model_ids:
                chosen.setdefault(slug.id, slug)
        return MarketplaceConfig(slugs=tuple(chosen.values()))

    def keys(self, raw: object) -> tuple[KeyConfig, ...]:
        """A refused key is not accepted, even if it was before: the operator may have replaced it for a reason."""
        if not isinstance(raw, list | tuple):
            self._found.append(_no_list("keys", raw))
            return tuple(key for key in self._last.keys if self._has_ledger or not _budget_of(key.limits))
        keys: dict[str, KeyConfig] = {}
        for index, entry in enumerate(raw):
            key = self._read(entry, KeyConfig, ("keys", index))
            if key is None:
                continue
            if key.name in keys:
                self._refuse(f"keys[{index}].name", f"must be unique, got {show(key.name)}")
                continue
            if not self._is_countable(key.limits, f"keys[{index}].limits"):
                continue
            keys[key.name] = key
            for position, name in enumerate(key.models or ()):
                if name not in self._ids:
                    self._refuse(
                        f"keys[{index}].models[{position}]", f"must be the id of a model or slug, got {show(name)}"
                    )
        return tuple(keys.values())

    def _model(self, raw: object, index: int, ids: set[str]) -> ModelConfig | None:
        model = self._read(raw, ModelConfig, ("models", index))
        if model is not None and model.id in ids:
            self._refuse(f"models[{index}].id", f"must be unique, got {show(model.id)}")
            return None
        try:
            return model if model is None or model.weights else None
        except ConfigRefused as exc:  # a relative path without a project root
            self._found.append(Refusal(f"models[{index}].source", str(exc)))
            return None

    def _slug(
        self, raw: object, index: int, model_ids: Collection[str], slug_ids: Collection[str]
    ) -> SlugConfig | None:
        slug = self._read(raw, SlugConfig, ("marketplace", "slugs", index))
        if slug is None:
            return None
        at, num_found = f"marketplace.slugs[{index}]", len(self._found)
        if slug.id in model_ids or slug.id in slug_ids:
            self._refuse(f"{at}.id", f"must be unique among slugs and models, got {show(slug.id)}")
        for position, endpoint in enumerate(slug.endpoints):
            base = None if endpoint.model is None else parse(endpoint.model).base
            if base is not None and base.name not in model_ids:
                what = f"must name a model of this file, got {show(endpoint.model)}"
                self._refuse(f"{at}.endpoints[{position}].model", what)
        return slug if len(self._found) == num_found else None

    def _read(self, raw: object, kind: type[_S], at: Location) -> _S | None:
        try:
            return kind.model_validate(raw)
        except ValidationError as exc:
            self._found += refusals(exc, kind, path_of(at), at)
            return None

    def _refuse(self, path: str, predicate: str) -> None:
        self._found.append(Refusal(path, f"{path} {predicate}."))


def _budget_of(limits: KeyLimits) -> str | None:
    """The first of the limits that are counted in the ledger."""
    return next((name for name in BUDGETS if getattr(limits, name) is not None), None)


def _no_list(name: str, raw: object) -> Refusal:
    if raw is None:
        return Refusal(name, f"{name} is required.")
    return Refusal(name, f"{name} must {'not be empty' if raw in ([], ()) else f'be a list, got {show(raw, name)}'}.")


def _has_slugs(raw: object) -> bool:
    return bool(raw.slugs if isinstance(raw, MarketplaceConfig) else isinstance(raw, dict) and raw.get("slugs"))


def _id_of(raw: object) -> str:
    named = raw.id if isinstance(raw, ModelConfig | SlugConfig) else raw.get("id") if isinstance(raw, dict) else None
    return named if isinstance(named, str) else ""
