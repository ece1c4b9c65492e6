"""Which GPUs the processes of each kind of deployment see, on a node that says it has four."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serve_app import app
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

MODEL = {"id": "m", "source": "nowhere", "engine": "fake", "cpus_per_replica": 0.1}
GPUS = {"0", "1", "2", "3"}


class Seeing:
    """Stands where a deployment would, with its options for Ray, and tells what it sees."""

    def see(self) -> tuple[str | None, list[str]]:
        """The devices that CUDA shows to this process, None for all; and those that Ray reserved for it."""
        import ray

        return os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_runtime_context().get_accelerator_ids()["GPU"]


def deployment_of(application: Any, name: str) -> Any:
    """One of the application's deployments, by name."""
    bound = application._bound_deployment  # Serve has no other way to ask
    below = [inner for inner in bound.init_args if hasattr(inner, "_bound_deployment")]
    return bound if bound.name == name else deployment_of(below[0], name)


@contextmanager
def running(name: str, deployment: Any, num_replicas: int = 1) -> Iterator[None]:
    from ray import serve

    options = {"num_replicas": num_replicas, "ray_actor_options": deployment.ray_actor_options}
    made = serve.deployment(Seeing).options(name="seeing", **options).bind()
    target = serve.RunTarget(made, name=name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    yield
    serve.delete(name)


def status(name: str) -> str:
    from ray import serve

    return str(serve.status().applications[name].status.value)


def seen(name: str) -> list[tuple[str | None, list[str]]]:
    from ray import serve

    eventually(lambda: status(name) == "RUNNING", 60)
    return sorted(serve.get_deployment_handle("seeing", name).broadcast("see").results(timeout_s=30))


def engine(**args: object) -> Any:
    return deployment_of(app.model({**MODEL, **args}), "engine")


def test_a_replica_with_a_gpu_has_it_alone_and_one_with_several_has_those(cluster: int) -> None:
    with running("one", engine(gpus_per_replica=1), 2), running("pair", engine(gpus_per_replica=2, tensor_parallel=2)):
        (first, _), (second, _) = seen("one")
        ((pair, reserved),) = seen("pair")
        assert pair is not None
        assert pair.split(",") == reserved
        assert sorted([first or "", second or "", *pair.split(",")]) == sorted(GPUS)


def test_replicas_with_half_a_gpu_share_one(cluster: int) -> None:
    with running("halves", engine(gpus_per_replica=0.5), 2):
        (first, _), (second, _) = seen("halves")
        assert first == second
        assert first in GPUS


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("cpu-engine", lambda: engine()),
        ("gate", lambda: deployment_of(app.model({**MODEL, "gpus_per_replica": 1}), "gate")),
        ("ingress", lambda: deployment_of(app.api({"cpus_per_replica": 0.1}), "ingress")),
        ("preprocessor", lambda: deployment_of(app.images({"cpus_per_replica": 0.1}), "preprocessor")),
    ],
)
def test_what_needs_no_gpu_sees_none(cluster: int, name: str, build: Any) -> None:
    with running(name, build()):
        assert seen(name) == [("", [])]


def test_a_replica_waits_for_the_type_of_gpu_that_it_names(cluster: int) -> None:
    with (
        running("absent", engine(gpus_per_replica=1, accelerator_type="B200")),
        running("present", engine(gpus_per_replica=1, accelerator_type="H200")),
    ):
        ((devices, _),) = seen("present")
        assert devices in GPUS
        assert status("absent") == "DEPLOYING"


def test_a_replica_waits_until_as_many_gpus_as_it_needs_are_free_on_one_node(cluster: int) -> None:
    with running("most", engine(gpus_per_replica=3, tensor_parallel=3)):
        ((devices, _),) = seen("most")
        assert devices is not None
        with running("two", engine(gpus_per_replica=2)), running("last", engine(gpus_per_replica=1)):
            ((last, _),) = seen("last")
            assert {*devices.split(","), last} == GPUS
            assert status("two") == "DEPLOYING"
