"""What is in `cluster/watch`: the boards' expressions, the alert rules, and a real Prometheus that evaluates them."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.config.deploy import free_port
from tests.support.readme_blocks import ROOT
from tests.support.waiting import eventually

WATCH = ROOT / "cluster" / "watch"
sys.path.append(str(WATCH))

import boards  # noqa: E402
import grafana  # noqa: E402
import start  # noqa: E402

__all__ = [
    "WATCH",
    "Prometheus",
    "alerts",
    "boards",
    "expressions",
    "grafana",
    "of_nodes",
    "of_service",
    "running_prometheus",
    "start",
    "tool",
]

Series = list[dict[str, Any]]
_EVERY = "3s"  # also how long Ray's agent may take to answer, which is busy with all processes of the tests


def tool(name: str) -> str:
    """The path of one of Prometheus' programs. Skips the test where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus prometheus-alertmanager")
    return path


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((WATCH / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """By board, panel and legend, or by alert: what Prometheus is asked, with Grafana's variables filled in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in alerts()}
    for path in sorted((WATCH / "boards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                asked = target["expr"].replace("$model", ".+").replace("$__rate_interval", "1m")
                found[f"{path.stem} / {panel['title']} / {target['legendFormat']}"] = asked
    return found


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", expression))


@dataclass(frozen=True)
class Prometheus:
    """A running one; `url` is that of its API."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        reply = httpx.get(f"{self.url}/{path}", params=parameters, timeout=10).json()
        assert reply["status"] == "success", reply
        return reply["data"]

    def ask(self, expression: str) -> Series:
        series: Series = self.get("query", query=expression)["result"]
        return series

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/status/buildinfo", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


def of_nodes(discovery: Path) -> dict[str, Any]:
    """The configuration of `make dashboards`, but reading every few seconds."""
    return start.prometheus_config(discovery, scrape_interval=_EVERY)


def of_service(port: int, key_file: Path) -> dict[str, Any]:
    """`prometheus-service.yml` for a service on this port, but reading every few seconds."""
    config: dict[str, Any] = yaml.safe_load((WATCH / "prometheus-service.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    scrape["authorization"] = {"credentials_file": str(key_file)}
    every = {"scrape_interval": _EVERY, "evaluation_interval": _EVERY}
    return {**config, "global": every, "rule_files": [str(WATCH / name) for name in config["rule_files"]]}


@contextmanager
def running_prometheus(config: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """By the command of `make dashboards`."""
    tool("prometheus")
    port = free_port()
    command = start.prometheus(folder, config, port)
    with subprocess.Popen(command) as process:
        prometheus = Prometheus(f"http://127.0.0.1:{port}/api/v1")
        try:
            eventually(prometheus.is_up)
            yield prometheus
        finally:
            process.terminate()
