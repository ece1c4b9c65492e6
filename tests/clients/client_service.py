"""The service that the clients talk to: `python -m serve_app up` with the demo's config.yaml, and a little more.

More are: the same model computed in float32, for log-likelihoods that have to be compared closely, a key that may run
one request at a time, and one that may send one a minute.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.config.deploy import free_port
from tests.support.processes.demo_config import text_config

ROOT = Path(__file__).parents[2]
MODEL_FOLDER = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
CHECKPOINTS = ROOT / "cluster" / "examples" / "checkpoints"

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUILL = "tinker://demo/sampler_weights/quill"
TOOLS = "tinker://demo/sampler_weights/tools"
BASE_FLOAT32 = "demo/float32"
QUILL_FLOAT32 = "tinker://float32/sampler_weights/quill"
KEY = "roundhouse-demo"
ONE_AT_A_TIME = "rh-one-at-a-time"
ONE_A_MINUTE = "rh-one-a-minute"

Json = dict[str, Any]


@dataclass(frozen=True)
class ClientService:
    """A running service."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def environment(self) -> dict[str, str]:
        """What the suites find the service by. Nothing else of this process' reaches a client: no key, no proxy."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        given = {
            "ROUNDHOUSE_URL": self.url,
            "ROUNDHOUSE_KEY": KEY,
            "ROUNDHOUSE_BASE": BASE,
            "ROUNDHOUSE_QUILL": QUILL,
            "ROUNDHOUSE_TOOLS": TOOLS,
            "ROUNDHOUSE_ONE_AT_A_TIME": ONE_AT_A_TIME,
            "ROUNDHOUSE_ONE_A_MINUTE": ONE_A_MINUTE,
        }
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return {**kept, **given, **offline, "NO_PROXY": "127.0.0.1"}


@contextmanager
def client_service(folder: Path) -> Iterator[ClientService]:
    """The service until the block ends. `folder` is empty; it takes the configuration and the checkpoints."""
    port = free_port()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(_checkpoints(folder / "store"))))
    command = [sys.executable, "-m", "serve_app", "up", "--config", str(config), "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        printed: list[str] = []
        try:
            for line in process.stdout:
                printed.append(line)
                if "is ready at" in line:
                    break
            assert "is ready at" in "".join(printed[-1:]), "".join(printed)
            yield ClientService(port)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)


def _checkpoints(store: Path) -> Path:
    """The two that are shipped, and `quill` once more, as if it had been trained on the float32 model."""
    shutil.copytree(CHECKPOINTS, store / "demo" / "sampler_weights")
    copy = store / "float32" / "sampler_weights" / "quill"
    shutil.copytree(CHECKPOINTS / "quill", copy)
    about = copy / "checkpoint.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "base_model": BASE_FLOAT32}))
    return store


def _config(store: Path) -> Json:
    config: Json = text_config()
    api, demo = config["applications"]
    (ingress,) = api["deployments"]
    served = ingress["user_config"]
    (entry,) = served["models"]
    served["models"].append({"id": BASE_FLOAT32, "app": "float32", "source": entry["source"]})
    served["checkpoints"]["roots"] = [str(store)]
    served["keys"] += [
        _key("one-at-a-time", ONE_AT_A_TIME, {"concurrency": 1}),
        _key("one-a-minute", ONE_A_MINUTE, {"requests_per_minute": 1}),
    ]
    float32 = {**demo["args"], "id": BASE_FLOAT32, "dtype": "float32", "cpus_per_replica": 0.5}
    demo["args"]["cpus_per_replica"] = 0.5
    config["applications"].append({**demo, "name": "float32", "args": float32})
    return config


def _key(name: str, key: str, limits: Json) -> Json:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "limits": limits}
