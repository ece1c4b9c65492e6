"""The `args` of a model application in config.yaml: one base model, its replicas and its engine.

Unknown keys and bad values are refused with one sentence. Sizes in bytes, times in seconds, lengths in tokens. All that
can be set, with its defaults:

    args:
      id: Qwen/Qwen3-8B            # the name in logs and metrics; required
      source: /models/qwen3-8b     # a folder, a .gguf file or a hub id; required (see `paths.py` for relative ones)
      engine: torch                # or fake: a deterministic engine without a model, to try a configuration out
      cpus_per_replica: 1          # what Ray reserves; fractions too
      gpus_per_replica: 0          # 0: on the CPU; a fraction shares a device; 1: a device of its own; 2 and more: the
                                   # model is split over that many devices of a machine (tensor_parallel)
      accelerator_type: null       # a Ray accelerator type, such as H200
      replicas:
        min: 1                     # 0: the model goes to sleep without requests and wakes with the next
        max: 1
        target: null               # requests per replica that autoscaling aims at; null: 80 % of max_running
        look_back_period_s: 30     # the number of requests is averaged over this time
        upscale_delay_s: 5
        downscale_delay_s: 300
      load_factor: 1.5             # a key leaves its replica when that has this many times the average load …
      least_busy: 4                # … and at least this many requests
      health:
        stalled_after_s: 30        # without progress for this long: not ready, and last in the router's order
        restart_after_s: 300       # without progress for this long: replaced
        silent_after_s: 7          # without a report for this long, as of a stopped process: not ready, and last in the
                                   # order too; Serve replaces what misses three health checks, after some 25 s
      graceful_shutdown_timeout_s: 900   # how long a replica that stops may finish its requests
      fake: {step_s: 0.02, tokens_per_step: 1, reply_tokens: 64, vocab_size: 32000}   # of engine: fake

and everything of `engines.config.EngineConfig` but the device, under its name there, such as `dtype`,
`context_length`, `kv_cache_bytes`, `max_running`, `max_waiting`, `max_adapters`, `threads`.
"""

import dataclasses
import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.config import AttentionName, DType, EngineConfig
from engines.fake import FakeConfig
from serve_app.config.paths import resolve_path, resolve_source
from serve_app.config.service import Count, NonEmptyText, Seconds, Tokens
from serve_app.errors import ConfigRefused
from serve_app.explain import Complaint, explain

Bytes = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=False)]
_LEAST_SILENCE_S = 5.0  # a replica that is well reports every 2 s, and its report takes up to one more to arrive
_TARGET_SHARE = 0.8  # of the batch: the rest takes the arrivals until a new replica is up


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class ReplicaCounts(_Section):
    """Bounds and target of autoscaling; equal bounds switch it off."""

    min: Annotated[int, Field(ge=0, le=10_000)] = 1
    max: Annotated[int, Field(ge=1, le=10_000)] = 1
    target: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)] | None = None
    look_back_period_s: Seconds = 30.0
    upscale_delay_s: Annotated[float, Field(ge=0, strict=False)] = 5.0
    downscale_delay_s: Annotated[float, Field(ge=0, strict=False)] = 300.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise Complaint(f"must be at most max, which is {self.max}", self.min, ".min")
        return self


class FakeSettings(_Section):
    """How fast and how long the deterministic engine replies (`engines.fake.FakeConfig`)."""

    step_s: Annotated[float, Field(ge=0, le=60, strict=False)] = 0.02
    tokens_per_step: Count = 1
    reply_tokens: Count | None = 64
    vocab_size: Annotated[int, Field(ge=100)] = 32_000


class HealthLimits(_Section):
    """The `user_config` of a model's engine deployment: how long without progress, or without a report, is too long.
    `build` says nothing: it makes one build of the application differ from the next (`app.py`).
    """

    stalled_after_s: Seconds = 30.0
    restart_after_s: Seconds = 300.0
    silent_after_s: Annotated[float, Field(ge=_LEAST_SILENCE_S, le=3600, strict=False)] = 7.0
    build: str = ""


class ModelArgs(_Section):
    """One base model, its replicas and its engine."""

    id: NonEmptyText
    source: NonEmptyText
    engine: Literal["torch", "fake"] = "torch"
    cpus_per_replica: Annotated[float, Field(ge=0, le=1024, strict=False)] = 1.0
    gpus_per_replica: Annotated[float, Field(ge=0, le=64, strict=False)] = 0.0
    accelerator_type: NonEmptyText | None = None
    replicas: ReplicaCounts = ReplicaCounts()
    load_factor: Annotated[float, Field(ge=1, le=100, strict=False)] = 1.5
    least_busy: Count = 4
    health: HealthLimits = HealthLimits()
    graceful_shutdown_timeout_s: Seconds = 900.0
    fake: FakeSettings = FakeSettings()

    revision: NonEmptyText | None = None
    trust_remote_code: bool = False
    dtype: DType = "auto"
    context_length: Tokens | None = None
    block_size: Annotated[int, Field(ge=16, multiple_of=16)] = 16
    kv_cache_bytes: Bytes | None = None
    memory_fraction: Fraction = 0.5
    prefix_cache: bool = True
    max_running: Count = 64
    max_waiting: Count = 1024
    max_step_tokens: Count = 1024
    max_step_tokens_decoding: Count = 256
    prefill_ratio: Annotated[float, Field(gt=0, le=1000, strict=False)] = 1.5
    image_cache_bytes: Bytes = 256 << 20
    max_adapters: Count = 256
    max_adapter_rank: Count = 64
    adapter_bytes: Bytes = 4 << 30
    max_adapter_file_bytes: Bytes = 2 << 30
    adapter_loaders: Count = 2
    adapter_load_timeout_s: Seconds = 60.0
    attention: AttentionName = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    kernel_cache: NonEmptyText = "~/.cache/roundhouse/kernels"
    exact: bool = False
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    self_test: bool = True

    @model_validator(mode="after")
    def _devices_are_whole(self) -> Self:
        gpus = self.gpus_per_replica
        if gpus > 1 and gpus != int(gpus):
            raise Complaint("must be a whole number above 1", gpus, ".gpus_per_replica")
        if self.tensor_parallel > 1 and gpus not in (0, self.tensor_parallel):
            raise Complaint("must be as many as gpus_per_replica", self.tensor_parallel, ".tensor_parallel")
        return self

    @property
    def capacity(self) -> int:
        """Requests that one replica takes, running and waiting."""
        return self.max_running + self.max_waiting

    @property
    def target_requests(self) -> float:
        """Requests per replica that autoscaling aims at."""
        return self.replicas.target or max(1, math.floor(_TARGET_SHARE * self.max_running))

    def engine_config(self) -> EngineConfig:
        """Raises `ConfigRefused` where two settings do not go together."""
        names = {field.name for field in dataclasses.fields(EngineConfig)} & type(self).model_fields.keys()
        settings = {name: getattr(self, name) for name in names}
        settings["source"] = resolve_source(self.source)
        settings["kernel_cache"] = resolve_path(self.kernel_cache)
        settings["tensor_parallel"] = max(self.tensor_parallel, int(self.gpus_per_replica))
        settings["device"] = "cuda" if self.gpus_per_replica else "cpu"
        try:
            return EngineConfig(**settings)
        except ValueError as exc:
            raise ConfigRefused(str(exc)) from exc

    def fake_config(self) -> FakeConfig:
        fake = FakeConfig(max_running=self.max_running, max_waiting=self.max_waiting, max_adapters=self.max_adapters)
        if self.context_length is not None:
            fake = dataclasses.replace(fake, context_length=self.context_length)
        return dataclasses.replace(fake, **self.fake.model_dump())


def parse_model_args(raw: object) -> ModelArgs:
    """Check the arguments of a model application as they came out of YAML. Raises `ConfigRefused` with one sentence."""
    try:
        args = ModelArgs.model_validate(raw)
    except ValidationError as exc:
        raise ConfigRefused(explain(exc.errors()[0], "args")[1]) from exc
    args.engine_config()
    return args
