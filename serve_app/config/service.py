"""What the ingress serves, as frozen values. Of the environment it reads the keys that are named here; besides, only
`paths.py` reads it (`ROUNDHOUSE_ROOT`), and `launch.py` hands it on.

`ServiceConfig` is the `user_config` of the ingress deployment in config.yaml. It can be replaced while the service
runs. Unknown keys and bad values are refused with one sentence that names the path of the key and the value. Sizes are
in bytes, times in seconds, lengths in tokens unless a name says otherwise. All that is set here, with its defaults:

    user_config:
      models:                                # the base models; required, at least one
        - id: Qwen/Qwen3-8B                  # what clients put in `model`; required; no ":", ";", "/ep/" or spaces
          app: qwen3-8b                      # the Serve application whose replicas run it; required
          source: /models/qwen3-8b           # folder, .gguf file or hub id (tokenizer, template, config); required, the
                                             # same as in the `args` of the application
          revision: null                     # of a hub id: branch, tag or commit; the same as in `args`
          renderer: null                     # a name of renderers/registry.py; null: found from tokenizer and template
          context_length: null               # tokens, prompt and completion; null: max_position_embeddings of source,
                                             # which is also the most; to be given if `args` give one, at most that
          variants: {"peft:32768": 32768}    # "<id>:peft:32768" is this model with that context length, within the same
                                             # bounds; default none
          allow_checkpoint_chat_template: false  # whether a checkpoint's own chat_template.jinja is used; off: it is
                                             # code that the owner of a checkpoint would run in this process
          also_known_as: []                  # other names by which checkpoints call this base, such as a training path
          owned_by: roundhouse               # shown by GET /models
      checkpoints:
        roots: [/checkpoints, "s3://b/runs"] # where tinker:// paths are looked up, in order; default none
        cache_directory: null                # copies of remote checkpoints and of those in tar files, which the models
                                             # read too: shared, with models on another machine than the ingress; null:
                                             # a folder under the user's cache
        cache_bytes: 53687091200             # bound of that folder
      keys:                                  # who may call; default nobody
        - name: ci                           # shown in logs and metrics; required, unique
          sha256: 5e88…                      # exactly one of the three: the key's SHA-256 in hex,
          env: CI_API_KEY                    # an environment variable of the ingress that holds the key,
          file: /run/secrets/ci              # or a file that holds it; both are read when a user_config is taken over,
                                             # which Serve does for one that changed, and at the start
          models: null                       # base ids that it may use, checkpoints on them included; null: all
          owner: alice                       # whose private checkpoints it may use; default none
          expires_at: 2031-01-01T00:00:00Z   # default never
          limits: {concurrency: 64}          # any of those of `limits.per_key`, for this key
      limits:
        body_bytes: 8388608                  # larger request bodies are refused (413)
        bytes_in_flight: 268435456           # that the requests of all keys hold in one ingress; beyond: 503
        body_timeout_s: 30                   # a body that takes longer is refused (400)
        messages: 4096                       # per request
        tools: 512                           # per request
        stop_sequences: 256                  # per request
        stop_length: 1024                    # characters of one stop string
        logit_bias_entries: 1024             # per request
        first_token_timeout_s: 120           # then 503
        total_timeout_s: 3600                # then 503, or an error event in a stream
        per_key:                             # null: no limit
          concurrency: 256                   # requests at the same time
          bytes_in_flight: 67108864          # that a key's requests hold in one ingress; beyond: 429
          requests_per_minute: null
          tokens_per_minute: null            # prompt and completion tokens: reserved when a request begins,
                                             # settled when it ends
"""

import hashlib
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_app.errors import ConfigRefused
from serve_app.explain import Complaint, explain


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


def _model_name(value: str) -> str:
    if not value or re.search(r"[:;\s]|/ep/", value) or not value.isprintable():
        raise Complaint('must be a name without ":", ";", "/ep/" or spaces', value)
    return value


def _variant(value: str) -> str:
    if not value or re.search(r"[;\s]|/ep/", value) or not value.isprintable():
        raise Complaint('must be a name without ";", "/ep/" or spaces', value)
    return value


Tokens = Annotated[int, Field(ge=1, le=2**31)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False, strict=False)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Bytes = Annotated[int, Field(ge=1, le=2**44)]
NonEmptyText = Annotated[str, Field(min_length=1)]


class ModelConfig(_Section):
    """One base model of the catalogue."""

    id: Annotated[str, AfterValidator(_model_name)]
    app: NonEmptyText
    source: NonEmptyText
    revision: NonEmptyText | None = None
    renderer: NonEmptyText | None = None
    context_length: Tokens | None = None
    variants: Mapping[Annotated[str, AfterValidator(_variant)], Tokens] = {}
    allow_checkpoint_chat_template: bool = False
    fetch_images: bool = Field(default=False, description="Whether images may be `https://` URLs beside data URLs.")
    also_known_as: tuple[NonEmptyText, ...] = Field(default=(), strict=False)
    owned_by: NonEmptyText = "roundhouse"


class CheckpointsConfig(_Section):
    """Where checkpoints are looked up, and the bounded local cache of the remote ones."""

    roots: tuple[NonEmptyText, ...] = Field(default=(), strict=False)
    cache_directory: NonEmptyText | None = None
    cache_bytes: Annotated[int, Field(ge=0)] = 50 * 2**30


class KeyLimits(_Section):
    """What one key may use; None is no limit."""

    concurrency: Count | None = None
    bytes_in_flight: Bytes | None = 64 * 2**20
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None


class KeyConfig(_Section):
    """One caller. The key itself stands nowhere in the configuration: its hash, or where to read it."""

    name: NonEmptyText
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    file: NonEmptyText | None = None
    models: tuple[NonEmptyText, ...] | None = Field(default=None, strict=False)
    owner: NonEmptyText | None = None
    expires_at: AwareDatetime | None = Field(default=None, strict=False)
    limits: KeyLimits = KeyLimits()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("sha256", "env", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            raise Complaint("must have exactly one of sha256, env and file", given)
        return self


class LimitsConfig(_Section):
    """Bounds on what a caller can make the service do."""

    body_bytes: Count = 8 * 2**20
    bytes_in_flight: Bytes = 256 * 2**20
    body_timeout_s: Seconds = 30.0
    messages: Count = 4096
    tools: Count = 512
    stop_sequences: Count = 256
    stop_length: Count = 1024
    logit_bias_entries: Count = 1024
    images: Count = Field(default=16, description="Images per request.")
    image_bytes: Count = Field(default=20 * 2**20, description="Bytes of an image file.")
    image_pixels: Count = Field(default=32 * 2**20, description="Pixels of an image, judged before it is decoded.")
    image_side: Count = Field(default=16_384, description="Pixels of the longer side of an image.")
    first_token_timeout_s: Seconds = 120.0
    total_timeout_s: Seconds = 3600.0
    per_key: KeyLimits = KeyLimits(concurrency=256)


class ImagesConfig(_Section):
    """Where images are prepared for vision models."""

    app: NonEmptyText = Field(description="The Serve application that prepares images.")
    timeout_s: Seconds = Field(
        default=60.0, description="How long the images of a request may take, the start of a process included."
    )


class ServiceConfig(_Section):
    """All of the above."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1, strict=False)]
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    images: ImagesConfig | None = Field(default=None, description="Unset: images are refused.")
    keys: tuple[KeyConfig, ...] = Field(default=(), strict=False)
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        _refuse_repeated("models", "id", [model.id for model in self.models])
        _refuse_repeated("keys", "name", [key.name for key in self.keys])
        known = {model.id for model in self.models}
        for index, key in enumerate(self.keys):
            for position, name in enumerate(key.models or ()):
                if name not in known:
                    raise Complaint("must be the id of a model", name, f"keys[{index}].models[{position}]")
        return self


def parse_config(raw: object) -> ServiceConfig:
    """Check a configuration as it came out of YAML. Raises `ConfigRefused` with one sentence."""
    try:
        return ServiceConfig.model_validate(raw)
    except ValidationError as exc:
        raise ConfigRefused(explain(exc.errors()[0], "The configuration")[1]) from exc


def key_digest(key: KeyConfig, more_variables: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """SHA-256 of the key, read from where its configuration says. `more_variables`: those that the ingress has and this
    process has not. Raises `ConfigRefused`.
    """
    if key.sha256 is not None:
        return bytes.fromhex(key.sha256)
    if key.env is not None:
        place = f"the environment variable {key.env!r}"
        secret = {**os.environ, **more_variables}.get(key.env, "")  # noqa: TID251 - where the rule sends everybody to
    else:
        assert key.file is not None
        place = f"the file {key.file!r}"
        try:
            secret = Path(key.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigRefused(f"The key {key.name!r} cannot be read from {place}.") from exc
    if not secret.strip():
        raise ConfigRefused(f"The key {key.name!r} is empty in {place}.")
    return hashlib.sha256(secret.strip().encode()).digest()


def is_expired(key: KeyConfig, now: datetime) -> bool:
    return key.expires_at is not None and now >= key.expires_at


def _refuse_repeated(section: str, field: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Complaint("must be unique", name, f"{section}[{index}].{field}")
