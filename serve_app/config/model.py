"""The `args` of a model application in config.yaml: one base model, its replicas and its engine. A change
restarts them.

The options of the engine are those of `engines.interface.config.EngineOptions`, whose fields `ModelArgs` inherits.
"""

import dataclasses
import math
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError, model_validator
from pydantic.dataclasses import dataclass
from typing_extensions import Doc

from engines.fake import FakeConfig
from engines.interface.config import EngineConfig, EngineOptions
from serve_app.base.errors import ConfigRefused
from serve_app.base.explain import Complaint, show
from serve_app.config.autoscaling import Autoscaling
from serve_app.config.checking.refusal import refusals
from serve_app.config.checking.section import RULES, Count, Cpus, Seconds, Section, Text
from serve_app.config.paths import resolve_path, resolve_source

_LEAST_SILENCE_S = 5  # with `transport: serve` a replica that is well reports every 2 s, which arrives up to 1 s later
_TARGET_SHARE = 0.8  # of the batch: the rest takes the arrivals until a new replica is up


class ModelScaling(Autoscaling):
    """The load that a replica should have."""

    target: Annotated[
        Annotated[float, Gt(0)] | None,
        Doc("Target of autoscaling: running requests per replica; null: 80 % of `max_running`."),
    ] = None
    target_kv: Annotated[
        float, Gt(0), Le(1), Doc("The same for the KV cache: the share that running requests should use.")
    ] = _TARGET_SHARE
    drain_s: Annotated[
        Seconds, Doc("Time in which queued prompts should be computed; replicas are added for those that take longer.")
    ] = 15.0


class FakeSettings(Section):
    """How fast and how long the deterministic engine replies (`engines.fake.FakeConfig`)."""

    step_s: Annotated[float, Ge(0), Le(60), Doc("Pause after each step.")] = 0.02
    reply_tokens: Annotated[
        Count | None, Doc("Mean length of a reply, in tokens; null: every reply runs to its `max_tokens`.")
    ] = 64
    vocab_size: Annotated[
        int, Ge(100), Doc("Number of token ids to choose from; at most the size of the tokenizer's vocabulary.")
    ] = 32_000


class HealthLimits(Section):
    """The longest times without progress, or without a report."""

    stalled_after_s: Annotated[
        Seconds, Doc("Without progress for this long, a replica is not ready and gets requests last.")
    ] = 30.0
    restart_after_s: Annotated[Seconds, Doc("Without progress for this long, a replica is replaced.")] = 300.0
    silent_after_s: Annotated[
        float,
        Ge(_LEAST_SILENCE_S),
        Le(3600),
        Doc(
            "Without a report for this long, as of a stopped process, a replica is not ready and gets requests last. "
            "After three times as long it is killed and replaced."
        ),
    ] = 7.0


class EngineUserConfig(HealthLimits):
    """The `user_config` of a model's engine deployment, made by `app.py`. `build` makes one build of the application
    differ from the next.
    """

    build: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, config=RULES)
class ModelArgs(EngineOptions):
    """One base model, its replicas and its engine."""

    id: Annotated[Text, Doc("Name of the model in logs and metrics.")]
    engine: Annotated[
        Literal["torch", "fake"], Doc("`fake`: a deterministic engine without a model, to test a configuration.")
    ] = "torch"
    cpus_per_replica: Annotated[Cpus, Doc("CPUs that Ray reserves for each replica.")] = 1.0
    gpus_per_replica: Annotated[
        float,
        Ge(0),
        Le(64),
        Doc("0: on the CPU; a fraction shares a GPU; 2 and more split the model over that many GPUs of a machine."),
    ] = 0.0
    accelerator_type: Annotated[Text | None, Doc("A Ray accelerator type that the replica needs, such as `H200`.")] = (
        None
    )
    replicas: Annotated[ModelScaling, Doc("How many replicas there are.")] = ModelScaling()
    load_factor: Annotated[
        float,
        Ge(1),
        Le(100),
        Doc(
            "Requests with the same key keep their replica until it has this many times the average load, and at least "
            "`load_floor` requests. More keeps more prefixes and adapters in place, less evens the load."
        ),
    ] = 1.1
    load_floor: Annotated[Count, Doc("See `load_factor`.")] = 4
    health: Annotated[HealthLimits, Doc("When a replica counts as stalled.")] = HealthLimits()
    graceful_shutdown_timeout_s: Annotated[
        Seconds, Doc("How long a replica that stops may take to finish its requests.")
    ] = 900.0
    fake: Annotated[FakeSettings, Doc("Settings of `engine: fake`.")] = FakeSettings()

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
        """Requests that one replica accepts, running and waiting."""
        return self.max_running + self.max_waiting

    @property
    def target_requests(self) -> float:
        """Target of autoscaling: requests per replica."""
        return self.replicas.target or max(1, math.floor(_TARGET_SHARE * self.max_running))

    def engine_config(self) -> EngineConfig:
        """Raises `ConfigRefused` where two settings contradict each other."""
        chosen = {option.name: getattr(self, option.name) for option in dataclasses.fields(EngineOptions)}
        chosen["source"] = resolve_source(self.source)
        chosen["kernel_cache"] = resolve_path(self.kernel_cache)
        chosen["tensor_parallel"] = max(self.tensor_parallel, int(self.gpus_per_replica))
        try:
            return EngineConfig(**chosen, device="cuda" if self.gpus_per_replica else "cpu")
        except ValueError as exc:
            raise ConfigRefused(str(exc)) from exc

    def fake_config(self) -> FakeConfig:
        fake = FakeConfig(max_running=self.max_running, max_waiting=self.max_waiting, max_adapters=self.max_adapters)
        if self.context_length is not None:
            fake = dataclasses.replace(fake, context_length=self.context_length)
        return dataclasses.replace(fake, **self.fake.model_dump())


def parse_model_args(raw: object) -> ModelArgs:
    """Check the arguments of a model application as read from YAML. Raises `ConfigRefused` with one sentence."""
    if not isinstance(raw, dict):
        raise ConfigRefused(f"args must be an object, got {show(raw)}.")
    try:
        args = ModelArgs(**{str(name): value for name, value in raw.items()})
    except ValidationError as exc:
        raise ConfigRefused(refusals(exc, ModelArgs, "args")[0].sentence) from exc
    args.engine_config()
    return args
