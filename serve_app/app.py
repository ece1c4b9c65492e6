"""The applications that config.yaml names: `api`, the ingress, and `model`, one per base model.

Each base model is a separate application. Serve restarts all deployments of an application when the arguments of one
change. So adding or changing a model does not restart the others or the ingress.
"""

import random
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serve_app.base.errors import ConfigRefused
from serve_app.config.api import ApiScaling, parse_api_args
from serve_app.config.autoscaling import Autoscaling
from serve_app.config.images import parse_image_args
from serve_app.config.model import ModelArgs, parse_model_args
from serve_app.deployments.ingress import Ingress
from serve_app.deployments.metrics import ImageMetrics
from serve_app.deployments.replica import Replica
from serve_app.deployments.tracing import require_packages
from serve_app.images.deployment import ImagePreprocessor
from serve_app.images.over_ray import IMAGE_DEPLOYMENT
from serve_app.replicas.over_ray import ENGINE_DEPLOYMENT

_DRAIN_CHECK_INTERVAL_S = 0.2
_HEALTH_CHECK_PERIOD_S = 2.0
_INGRESS_HEALTH_CHECK_PERIOD_S = 1.0  # the clock on which the ages of replicas' reports are measured
# Serve replaces what misses three checks in a row, after some 25 s.
_HEALTH_CHECK_TIMEOUT_S = 8.0
_ROUTING_STATS_PERIOD_S = 1.0
# Serve must not turn requests away before the engine does: it counts those that are being routed, not those that run.
_QUEUED_PER_CAPACITY = 4
_UNBOUNDED = 1_000_000
# Ray does not set the first variable for actors without devices, so they would see all of them. The last one silences
# what transformers says about torch that is missing: see `without_torch`.
_WITHOUT_TORCH = {
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


class Gate:
    """The root of a model's application, which does nothing. Under HAProxy a root deployment may not have its own
    router, so the engine is a child of it. The ingress calls the engine directly.
    """

    def __init__(self, engine: serve.handle.DeploymentHandle) -> None:
        self._engine = engine


def api(args: dict[str, object]) -> Application:
    """The ingress; `args` as in `config.api.ApiArgs`."""
    with _readable_errors():
        parsed = parse_api_args(args)
        if parsed.tracing is not None:
            require_packages()
    parsed = parsed.model_copy(update={"replicas": parsed.replicas.on(_num_nodes())})
    options = {
        "name": "ingress",
        # Serve would queue requests over its own bound, probes too, before any key is checked. So the ingress counts
        # requests itself (`Capacity`), and Serve's bounds apply only while no ingress runs.
        "max_ongoing_requests": _UNBOUNDED,
        "max_queued_requests": parsed.max_ongoing_requests,
        "ray_actor_options": {
            "num_cpus": parsed.cpus_per_replica,
            "runtime_env": _environment(**_WITHOUT_TORCH),
        },
        **_ingress_counts(parsed.replicas),
        **_lifecycle(parsed.graceful_shutdown_timeout_s, check_period_s=_INGRESS_HEALTH_CHECK_PERIOD_S),
    }
    return serve.deployment(serve.ingress()(Ingress)).options(**options).bind(parsed)


def model(args: dict[str, object]) -> Application:
    """One base model; `args` as in `config.model.ModelArgs`."""
    with _readable_errors():
        parsed = parse_model_args(args)
    engine = serve.deployment(Replica).options(
        name=ENGINE_DEPLOYMENT,
        ray_actor_options=_engine_resources(parsed),
        max_ongoing_requests=_QUEUED_PER_CAPACITY * parsed.capacity,
        max_queued_requests=_QUEUED_PER_CAPACITY * parsed.capacity,
        request_router_config={
            "request_router_class": "serve_app.replicas.router.AffinityRouter",
            "request_router_kwargs": {
                "capacity": parsed.capacity,
                "load_factor": parsed.load_factor,
                "load_floor": parsed.load_floor,
            },
            "request_routing_stats_period_s": _ROUTING_STATS_PERIOD_S,
            "initial_backoff_s": 0.005,
            "max_backoff_s": 0.05,
        },
        **_scaling(parsed.replicas, parsed.target_requests, _policy(parsed), **parsed.health.model_dump()),
        **_lifecycle(parsed.graceful_shutdown_timeout_s),
    )
    gate = serve.deployment(Gate).options(
        name="gate", ray_actor_options={"num_cpus": 0, "runtime_env": _environment(CUDA_VISIBLE_DEVICES="")}
    )
    return gate.bind(engine.bind(parsed))


def images(args: dict[str, object]) -> Application:
    """The deployment that prepares images for all vision models; `args` as in `config.images.ImageArgs`."""
    with _readable_errors():
        parsed = parse_image_args(args)
    preprocessor = serve.deployment(ImagePreprocessor).options(
        name=IMAGE_DEPLOYMENT,
        max_ongoing_requests=parsed.max_ongoing_requests,
        max_queued_requests=_QUEUED_PER_CAPACITY * parsed.max_ongoing_requests,
        ray_actor_options={
            "num_cpus": parsed.cpus_per_replica,
            "runtime_env": _environment(**_WITHOUT_TORCH, OMP_NUM_THREADS="1"),
        },
        **_scaling(parsed.replicas, parsed.replicas.target),
        **_lifecycle(parsed.graceful_shutdown_timeout_s),
    )
    return preprocessor.bind(parsed, ImageMetrics)


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Convert errors to Serve's own exception: Serve shows its message, but a traceback for any other exception."""
    try:
        yield
    except ConfigRefused as exc:
        raise RayServeException(str(exc)) from exc


def _policy(args: ModelArgs) -> dict[str, object]:
    """The autoscaling of a model. A policy that Serve imports by name goes to its controller by value."""
    kwargs = {
        "target_batch": min(1.0, args.target_requests / args.max_running),
        "target_kv": args.replicas.target_kv,
        "drain_s": args.replicas.drain_s,
    }
    return {"policy": {"policy_function": "serve_app.replicas.scaling.policy:LoadPolicy", "policy_kwargs": kwargs}}


def _scaling(
    counts: Autoscaling, target: float, policy: Mapping[str, object] = MappingProxyType({}), **user_config: object
) -> dict[str, object]:
    if counts.min == counts.max:
        return {"num_replicas": counts.max}
    # Different for every build: Serve 2.60 does not scale a deployment that is built again without a change, as after a
    # rollback of a failed update. A changed user_config restarts nothing.
    changing = {**user_config, "build": uuid.uuid4().hex}
    return {"user_config": changing, "autoscaling_config": {**_autoscaling(counts, target), **policy}}


def _ingress_counts(scaling: ApiScaling) -> dict[str, object]:
    if scaling.min == scaling.max:
        return {"num_replicas": scaling.max}
    autoscaling = _autoscaling(scaling, scaling.target)
    # As above; its user_config is that of config.yaml, so a delay that nobody notices makes the difference.
    autoscaling["upscale_delay_s"] = scaling.upscale_delay_s + random.random() / 1000
    return {"autoscaling_config": autoscaling}


def _autoscaling(counts: Autoscaling | ApiScaling, target: float) -> dict[str, object]:
    return {
        "min_replicas": counts.min,
        "max_replicas": counts.max,
        "target_ongoing_requests": target,
        "look_back_period_s": counts.look_back_period_s,
        "upscale_delay_s": counts.upscale_delay_s,
        "downscale_delay_s": counts.downscale_delay_s,
    }


def _num_nodes() -> int:
    """Of the cluster, when the application is built."""
    return sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1


def _lifecycle(
    graceful_shutdown_timeout_s: float, *, check_period_s: float = _HEALTH_CHECK_PERIOD_S
) -> dict[str, object]:
    return {
        "graceful_shutdown_timeout_s": graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_CHECK_INTERVAL_S,
        "health_check_period_s": check_period_s,
        "health_check_timeout_s": _HEALTH_CHECK_TIMEOUT_S,
    }


def _engine_resources(args: ModelArgs) -> dict[str, object]:
    environment = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    if args.threads is not None:
        environment["OMP_NUM_THREADS"] = str(args.threads)
    if args.gpus_per_replica == 0:
        # Ray does not set the variable for actors without devices, so they would see all of them.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    resources: dict[str, object] = {
        "num_cpus": args.cpus_per_replica,
        "num_gpus": args.gpus_per_replica,
        "runtime_env": _environment(**environment),
    }
    if args.accelerator_type is not None:
        resources["accelerator_type"] = args.accelerator_type
    return resources


def _environment(**variables: str) -> dict[str, Mapping[str, str]]:
    """A runtime environment with these variables and those of the application in config.yaml.

    Serve drops the application's variables from a deployment that sets any in code.
    """
    inherited = ray.get_runtime_context().runtime_env.get("env_vars", {}) if ray.is_initialized() else {}
    return {"env_vars": {**inherited, **variables}}
