"""What the applications tell Serve of their arguments."""

from typing import Any

import pytest

from serve_app import app
from serve_app.config.api import parse_api_args

MODEL: dict[str, object] = {"id": "m", "source": "owner/model"}


def deployments(application: Any) -> dict[str, Any]:
    """Those of an application, by name."""
    bound = application._bound_deployment  # Serve has no other way to ask
    below = [inner for inner in bound.init_args if hasattr(inner, "_bound_deployment")]
    return {bound.name: bound, **{name: found for inner in below for name, found in deployments(inner).items()}}


def engine(**args: object) -> Any:
    return deployments(app.model({**MODEL, **args}))["engine"]


@pytest.mark.parametrize(
    ("args", "resources"),
    [
        ({}, {"num_cpus": 1.0, "num_gpus": 0.0}),
        ({"cpus_per_replica": 3}, {"num_cpus": 3.0, "num_gpus": 0.0}),
        (
            {"gpus_per_replica": 0.5, "accelerator_type": "H200"},
            {"num_cpus": 1.0, "num_gpus": 0.5, "accelerator_type": "H200"},
        ),
    ],
)
def test_a_replica_reserves_what_its_arguments_say(args: Any, resources: dict[str, object]) -> None:
    options = dict(engine(**args).ray_actor_options)
    variables = options.pop("runtime_env")["env_vars"]
    assert options == resources
    assert variables.get("CUDA_VISIBLE_DEVICES") == (None if resources["num_gpus"] else "")


def engine_options(counts: dict[str, int]) -> Any:
    return engine(max_running=10, replicas=counts)


def image_options(counts: dict[str, int]) -> Any:
    return deployments(app.images({"replicas": counts}))["preprocessor"]


@pytest.mark.parametrize(("build", "expected"), [(engine_options, (8, 60, 5, 300)), (image_options, (2, 60, 2, 300))])
def test_between_bounds_replicas_come_and_go_as_the_arguments_say(build: Any, expected: tuple[int, ...]) -> None:
    scaling = build({"min": 0, "max": 3, "look_back_period_s": 60})._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (0, 3)
    delays = (scaling.look_back_period_s, scaling.upscale_delay_s, scaling.downscale_delay_s)
    assert (scaling.target_ongoing_requests, *delays) == expected


@pytest.mark.parametrize(("target", "share"), [(None, 0.8), (4, 0.4), (99, 1.0)])
def test_a_model_scales_by_its_load_and_not_by_its_requests(target: int | None, share: float) -> None:
    scaling = {"min": 0, "max": 3, "target": target, "target_kv": 0.7, "drain_s": 9}
    policy = engine(max_running=10, replicas=scaling)._deployment_config.autoscaling_config.policy
    assert policy.policy_function == "serve_app.replicas.scaling.policy:LoadPolicy"
    assert policy.policy_kwargs == {"target_batch": share, "target_kv": 0.7, "drain_s": 9.0}
    assert callable(policy.get_policy()(**policy.policy_kwargs))


@pytest.mark.parametrize("build", [engine_options, image_options])
def test_what_scales_differs_in_every_build(build: Any) -> None:
    """Serve would stop scaling what is built again without a change."""
    first, second = build({"min": 0, "max": 3}), build({"min": 0, "max": 3})
    assert first._deployment_config.user_config != second._deployment_config.user_config
    assert callable(first.func_or_class.reconfigure)  # it gets the user_config


@pytest.mark.parametrize("build", [engine_options, image_options])
def test_equal_bounds_switch_autoscaling_off(build: Any) -> None:
    made = build({"min": 2, "max": 2})
    assert (made.num_replicas, made._deployment_config.autoscaling_config) == (2, None)


def test_the_router_of_a_model_knows_when_a_replica_is_too_busy_for_a_key() -> None:
    made = engine(load_factor=2, load_floor=9, max_running=3, max_waiting=4)
    router = made._deployment_config.request_router_config
    assert router.request_router_kwargs == {"capacity": 7, "load_factor": 2.0, "load_floor": 9}


def ingress_on(num_nodes: int, **replicas: int) -> tuple[int | None, int | None, bool]:
    """Fewest and most ingresses on a cluster of so many nodes, and whether there is never more than one."""
    args = parse_api_args({"replicas": replicas})
    found = args.model_copy(update={"replicas": args.replicas.on(num_nodes)})
    return found.replicas.min, found.replicas.max, found.is_alone


def test_there_are_two_ingresses_where_there_are_two_nodes_and_more_where_there_are_more() -> None:
    assert [ingress_on(nodes) for nodes in (0, 1, 2, 5)] == [(1, 1, True), (1, 1, True), (2, 2, False), (2, 5, False)]
    assert ingress_on(5, min=1) == (1, 1, True)
    assert ingress_on(5, max=1) == (1, 1, True)
    assert ingress_on(1, max=4) == (1, 4, False)
    assert ingress_on(9, min=3, max=4) == (3, 4, False)


def test_between_bounds_ingresses_come_and_go_and_every_build_differs() -> None:
    args = {"replicas": {"min": 2, "max": 5, "target": 70, "downscale_delay_s": 9}}
    first, second = (deployments(app.api(args))["ingress"]._deployment_config.autoscaling_config for _ in range(2))
    assert (first.min_replicas, first.max_replicas, first.target_ongoing_requests) == (2, 5, 70)
    assert (first.look_back_period_s, first.downscale_delay_s) == (30, 9)
    assert first.upscale_delay_s == pytest.approx(10, abs=0.01)
    assert first != second


def test_an_ingress_takes_as_many_requests_as_its_arguments_say() -> None:
    ingress = deployments(app.api({"replicas": 3, "max_ongoing_requests": 77, "cpus_per_replica": 0.5}))["ingress"]
    assert (ingress.num_replicas, ingress._deployment_config.max_queued_requests) == (3, 77)
    assert ingress.ray_actor_options["num_cpus"] == 0.5
