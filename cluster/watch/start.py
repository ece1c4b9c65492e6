#!/usr/bin/env python3
"""Starts Prometheus and Grafana beside a service of this machine: `make dashboards`. Ctrl-C ends both.

Both listen on 127.0.0.1 only. What they write lies in a temporary folder, which goes with them.
"""

import argparse
import configparser
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.run_folder import RunFolder

HERE = Path(__file__).parent
DISCOVERY = "prom_metrics_service_discovery.json"  # Ray's dashboard writes it into the folder of its session

HOW_TO_GET = {
    "prometheus": "Prometheus is not here. Debian and Ubuntu have it: apt-get install prometheus",
    "grafana": "Grafana is not here, so the boards are not shown. Its makers have packages for every system. "
    "Without it, Prometheus shows the alerts, and every expression of cluster/watch/boards.py.",
}


def prometheus_config(discovery: Path, *, scrape_interval: str = "5s") -> dict[str, Any]:
    """prometheus.yml for the nodes that this file of Ray lists, with the rules, and without an Alertmanager."""
    config: dict[str, Any] = yaml.safe_load((HERE / "prometheus.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    (discover,) = scrape["file_sd_configs"]
    discover["files"] = [str(discovery)]
    config["rule_files"] = [str(HERE / name) for name in config["rule_files"]]
    config["global"] = {"scrape_interval": scrape_interval, "evaluation_interval": scrape_interval}
    del config["alerting"]
    return config


def prometheus(folder: Path, config: dict[str, Any], port: int) -> list[str]:
    """The command of a Prometheus that keeps its data in `folder`."""
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]


def grafana(folder: Path, port: int, prometheus_port: int) -> list[str]:
    """The command of a Grafana that shows the boards to everybody on this machine, without a login."""
    provisioning = folder / "provisioning"
    source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "isDefault": True}
    source["url"] = f"http://127.0.0.1:{prometheus_port}"
    boards = {"name": "Roundhouse", "folder": "Roundhouse", "type": "file", "options": {"path": str(HERE / "boards")}}
    _write(provisioning / "datasources" / "prometheus.yml", {"apiVersion": 1, "datasources": [source]})
    _write(provisioning / "dashboards" / "roundhouse.yml", {"apiVersion": 1, "providers": [boards]})
    settings = configparser.ConfigParser()
    settings["server"] = {"http_addr": "127.0.0.1", "http_port": str(port)}
    settings["paths"] = {"data": f"{folder}/grafana", "logs": f"{folder}/grafana", "provisioning": f"{provisioning}"}
    settings["auth.anonymous"] = {"enabled": "true", "org_role": "Viewer"}
    settings["analytics"] = {"reporting_enabled": "false", "check_for_updates": "false"}
    settings["log"] = {"mode": "console", "level": "warn"}
    with (folder / "grafana.ini").open("w", encoding="utf-8") as file:
        settings.write(file)
    return ["grafana", "server", "--homepath", "/usr/share/grafana", "--config", str(folder / "grafana.ini")]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="of the service; default: 8000")
    parser.add_argument("--prometheus-port", type=int, default=9090, help="default: 9090")
    parser.add_argument("--grafana-port", type=int, default=3000, help="default: 3000")
    options = parser.parse_args(arguments)
    for name in ("prometheus", "grafana"):
        if shutil.which(name) is None:
            print(HOW_TO_GET[name], flush=True)
    if shutil.which("prometheus") is None:
        return 1
    service = RunFolder.of(options.port)
    if not service.is_claimed():
        print(f"No service of yours runs on port {options.port}: start it with `make serve`, or name its port.")
        return 1
    with tempfile.TemporaryDirectory(prefix="roundhouse-watch-") as name:
        folder = Path(name)
        config = prometheus_config(service.path / DISCOVERY)
        started = {
            f"Prometheus: http://127.0.0.1:{options.prometheus_port}/alerts": prometheus(
                folder, config, options.prometheus_port
            )
        }
        if shutil.which("grafana") is not None:
            where = f"Grafana: http://127.0.0.1:{options.grafana_port}/dashboards"
            started[where] = grafana(folder, options.grafana_port, options.prometheus_port)
        return _run(started)


def _run(commands: Mapping[str, Sequence[str]]) -> int:
    """Start them all. Returns when the first of them ends, with its status, or on Ctrl-C and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell that starts it in the background has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    with ExitStack() as stack:
        running = []
        for where, command in commands.items():
            running.append(process := subprocess.Popen(command))
            stack.callback(_end, process)
            print(where, flush=True)
        try:
            return running[0].wait()
        except KeyboardInterrupt:
            return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
