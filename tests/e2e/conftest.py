"""One real Ray Serve for all tests of this folder: loopback, free ports, Serve's own proxy, deterministic engines.

Nothing of it is left when the session ends. HAProxy mode: `test_up.py` and `test_proxy.py`.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest

from tests.e2e.service_config import KEY, service_config
from tests.support.processes.demo_config import text_config
from tests.support.processes.running_up import MODEL
from tests.support.waiting import eventually

Json = dict[str, Any]


def ingresses(config: Json) -> Iterator[tuple[str, Json]]:
    """The prefix and the `user_config` of each."""
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            if "models" in deployment.get("user_config", {}):
                yield application["route_prefix"].rstrip("/"), deployment["user_config"]


def ingresses_with(model: str, config: Json) -> set[str]:
    """The prefixes of the ingresses that this configuration tells of the model."""
    return {prefix for prefix, told in ingresses(config) if model in [entry["id"] for entry in told["models"]]}


@dataclass
class Service:
    """The running service, and what tests do to it."""

    port: int
    config: Json
    deployed: Json | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sdk(self, prefix: str = "", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}{prefix}/v1", api_key=KEY, **options)

    def deploy(self, config: Json) -> None:
        """What `serve deploy` does; returns before it has happened."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
        self.deployed = config

    @contextmanager
    def serving(self, model: str, config: Json, *, within_s: float = 120) -> Iterator[Self]:
        """With another configuration, once it serves this model; then with its first one again."""
        self.deploy(config)
        eventually(lambda: self.listing(model) == ingresses_with(model, config), within_s)
        eventually(self.is_ready, within_s)
        yield self
        self.deploy(self.config)
        # Else the next to serve this model would take this configuration for its own.
        eventually(lambda: self.listing(model) == ingresses_with(model, self.config), 120)
        eventually(self.is_ready, 120)

    def listing(self, model: str) -> set[str]:
        """The prefixes of the ingresses that list it."""
        prefixes = {prefix for prefix, _ in ingresses(self.deployed or self.config)}
        return {prefix for prefix in prefixes if model in [listed.id for listed in self.sdk(prefix).models.list()]}

    def is_ready(self) -> bool:
        try:  # Serve holds requests back while it has no ingress
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def engines(self, app: str) -> list[dict[str, float]]:
        """What each engine of a model says it has to do."""
        return self.broadcast(app, "record_autoscaling_stats")

    def broadcast(self, app: str, method: str) -> list[Any]:
        from ray import serve

        return serve.get_deployment_handle("engine", app).broadcast(method).results(timeout_s=10)

    def is_idle(self, app: str = "m") -> bool:
        from ray.serve.exceptions import DeploymentUnavailableError

        try:
            return all(engine["running"] == engine["waiting"] == engine["streams"] == 0 for engine in self.engines(app))
        except DeploymentUnavailableError:  # its replica is being replaced
            return False


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support.files.tiny_tokenizer import save_model_folder

    return str(save_model_folder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[int]:
    """Ray and Serve, with nothing deployed; the port of the proxy."""
    import ray
    from ray import serve

    from serve_app.config.deploy import free_port

    folder = tempfile.mkdtemp(prefix="rh-", dir="/tmp")  # Ray's sockets lie below it: their paths must be short
    port = free_port()
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=4,  # that are not there: nothing here computes on one
        resources={"accelerator_type:H200": 1},
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        namespace="serve",
        object_store_memory=100 << 20,
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def session_service(cluster: int, model_folder: str) -> Service:
    service = Service(cluster, service_config(model_folder))
    service.deploy(service.config)
    eventually(service.is_ready, 120)
    return service


@pytest.fixture
def service(session_service: Service) -> Iterator[Service]:
    """The service in its first state; what a test changed is put back."""
    yield session_service
    if session_service.deployed is not session_service.config:
        session_service.deploy(session_service.config)
        eventually(session_service.is_ready, 60)
    eventually(session_service.is_idle)


@pytest.fixture(scope="session")
def config(model_folder: str) -> Json:
    """config.yaml with a model that costs nothing, and without checkpoints."""
    raw: Json = text_config()
    api, model = raw["applications"]
    user_config = api["deployments"][0]["user_config"]
    (served,) = user_config["models"]
    served["source"] = model_folder
    user_config["checkpoints"] = {"roots": []}
    fake = {"vocab_size": 512, "step_s": 0.02, "reply_tokens": None}
    model["args"] = {"id": MODEL, "source": model_folder, "engine": "fake", "fake": fake, "cpus_per_replica": 0.1}
    return raw
