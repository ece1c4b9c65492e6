"""The demo model behind a service of its own, for benches: what `make serve` runs, with room for more requests and
checkpoints.

    python tests/bench/bench_service.py --store STORE --port 8200 [--set max_running=64 …]

runs it in the foreground, its key is "k". `STORE` is a checkpoint root, see `make_adapters.py`.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_FOLDER = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
APP = "smollm2-135m"
KEY = "k"
ENGINE = {"max_running": 64, "max_waiting": 512, "max_adapters": 1024, "kv_cache_bytes": 2 << 30, "dtype": "bfloat16"}


def configuration(store: Path, engine: Mapping[str, Any]) -> dict[str, Any]:
    """`config.yaml` with the bench's store, key and engine settings."""
    raw: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    raw["applications"] = raw["applications"][:2]  # without the vision model and what prepares images
    for app in raw["applications"]:
        if app["name"] == APP:
            app["args"] |= {**ENGINE, **engine}
        else:
            user_config = app["deployments"][0]["user_config"]
            user_config["models"] = user_config["models"][:1]
            del user_config["images"]
            user_config["checkpoints"]["roots"] = [str(store.resolve())]
            user_config["keys"] = [{"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]
            user_config["limits"] = {"per_key": {"concurrency": 1000}}
    return raw


@contextlib.contextmanager
def running(store: Path, port: int, engine: Mapping[str, Any]) -> Iterator[str]:
    """The service's URL, once it is ready; it is ended on the way out."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(configuration(store, engine)))
        command = [sys.executable, "-m", "serve_app", "up", "--config", str(config), "--port", str(port)]
        process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ, ROUNDHOUSE_ROOT=str(ROOT)))
        url = f"http://127.0.0.1:{port}"
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    raise SystemExit("the service did not start")
                time.sleep(0.5)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--set", action="append", default=[], help="an engine setting, name=value")
    options = parser.parse_args()
    settings = {name: yaml.safe_load(value) for name, _, value in (item.partition("=") for item in options.set)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), running(options.store, options.port, settings):
        signal.pause()


if __name__ == "__main__":
    main()
