"""The configuration that the tests of this folder run."""

import copy
import hashlib
from pathlib import Path
from typing import Any

from tests.support.processes.demo_modules import ROOT

KEY = "rh-e2e-key"
MODEL = "tiny/Chat"
SLEEPY = "tiny/Sleepy"  # no replica until it is asked
GROWING = "tiny/Growing"  # one to two replicas
PAIR = "tiny/Pair"  # two replicas, only `with_pair`
DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLAIN_PREFIX = "/plain"  # the same over Serve's own streams

Json = dict[str, Any]


def service_config(model_folder: str) -> Json:
    """An ingress on the side channel, one on Serve's streams, and three models."""
    user_config = {
        "models": [
            {"id": MODEL, "app": "m", "source": model_folder},
            {"id": SLEEPY, "app": "sleepy", "source": model_folder},
            {"id": GROWING, "app": "growing", "source": model_folder},
        ],
        "keys": [{"name": "e2e", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
        "limits": {"per_key": {"concurrency": 1000}},
    }
    quick = {"look_back_period_s": 11, "upscale_delay_s": 0.5, "downscale_delay_s": 2}
    return {
        "applications": [
            api("api", "/", user_config, transport="channel"),
            api("plain", PLAIN_PREFIX, user_config, transport="serve"),
            model("m", max_running=64, max_waiting=200),
            model("sleepy", replicas={"min": 0, "max": 1, **quick}),
            model("growing", max_running=4, replicas={"min": 1, "max": 2, **quick}),
        ]
    }


def api(name: str, prefix: str, user_config: Json, *, transport: str) -> Json:
    args = {
        "cpus_per_replica": 0.1,
        "transport": transport,
        "channel_host": None,
        "no_replica_timeout_s": 5,
        "graceful_shutdown_timeout_s": 30,
    }
    deployments = [{"name": "ingress", "user_config": user_config}]
    return {
        "name": name,
        "route_prefix": prefix,
        "import_path": "serve_app.app:api",
        "args": args,
        "deployments": deployments,
    }


def model(app: str, **args: Any) -> Json:
    """An application of a deterministic engine, unless `args` say otherwise; None takes one of the usual ones away."""
    fake = {"step_s": 0.01, "vocab_size": 512, "reply_tokens": None}
    usual = {"id": app, "source": "nowhere", "engine": "fake", "cpus_per_replica": 0.1, "fake": fake}
    usual["graceful_shutdown_timeout_s"] = 30
    return {
        "name": app,
        "route_prefix": None,
        "import_path": "serve_app.app:model",
        "args": {name: value for name, value in {**usual, **args}.items() if value is not None},
    }


def with_demo(config: Json, store: Path, **args: Any) -> Json:
    """With the demo on the torch engine beside the deterministic models, as the application `demo`."""
    source = str(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    entry = {"id": DEMO, "app": "demo", "source": source, "renderer": "qwen3_text"}
    settings: Json = {"engine": "torch", "id": DEMO, "source": source, "fake": None, "max_running": 16}
    config = copy.deepcopy(config)
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            models = [*deployment["user_config"]["models"], {**entry, "allow_checkpoint_chat_template": True}]
            roots = {"roots": [str(store)]}
            deployment["user_config"] = {**deployment["user_config"], "models": models, "checkpoints": roots}
    config["applications"].append(model("demo", **settings, max_waiting=300, kv_cache_bytes=512 << 20, **args))
    return config


def with_pair(config: Json) -> Json:
    """With a model of two replicas, as the application `pair`."""
    config = copy.deepcopy(config)
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            models = deployment["user_config"]["models"]
            models = [*models, {**models[0], "id": PAIR, "app": "pair"}]
            deployment["user_config"] = {**deployment["user_config"], "models": models}
    config["applications"].append(model("pair", replicas={"min": 2, "max": 2}))
    return config
