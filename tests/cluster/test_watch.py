"""The boards, the alert rules and the configuration of Prometheus, without a running service."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.deployments.metrics import EngineMetrics, Exporter, ImageMetrics, IngressMetrics
from serve_app.deployments.node_metrics import NODE_UP
from tests.support.readable_metrics import ReadableMetrics
from tests.support.readme_blocks import ROOT, environment
from tests.support.watching import WATCH, alerts, boards, expressions, grafana, metrics_in, of_service, start, tool

PAGE = (ROOT / "cluster" / "README.md").read_text(encoding="utf-8")
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
# What Ray Serve exports itself; tests/e2e/test_prometheus.py finds both in a real scrape.
OF_SERVE = {"ray_serve_deployment_replica_healthy", "ray_serve_deployment_replica_starts_total"}


@pytest.mark.parametrize("board", boards.BOARDS, ids=lambda board: board.path.stem)
def test_the_file_of_a_board_is_made_from_its_description(board: Any) -> None:
    assert board.path.read_text(encoding="utf-8") == grafana.text(board), "python cluster/watch/boards.py makes it anew"


def test_every_file_of_a_board_has_a_description() -> None:
    assert {board.path for board in boards.BOARDS} == set((WATCH / "boards").iterdir())


@pytest.mark.parametrize("board", boards.BOARDS, ids=lambda board: board.path.stem)
def test_the_panels_of_a_board_have_numbers_of_their_own_and_do_not_overlap(board: Any) -> None:
    panels = grafana.dashboard(board)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def exported() -> set[str]:
    """The names under which Ray exports what `metrics.py` declares."""
    counters, gauges, histograms = (ReadableMetrics() for _ in range(3))
    exporter = Exporter(counters.exporter.counter, gauges.exporter.gauge, histograms.exporter.histogram)
    IngressMetrics(exporter)
    EngineMetrics("m", exporter)
    ImageMetrics(exporter)
    return (
        {f"ray_{name}_total" for name in counters.metrics}
        | {f"ray_{name}" for name in gauges.metrics}
        | {f"ray_{name}{suffix}" for name in histograms.metrics for suffix in OF_HISTOGRAMS}
    )


@pytest.mark.parametrize("name", expressions())
def test_an_expression_names_only_metrics_that_are_exported(name: str) -> None:
    named = metrics_in(expressions()[name])
    assert named - exported() - OF_SERVE - {NODE_UP} == set()
    assert named


def test_every_alert_has_a_severity_and_a_row_on_the_page() -> None:
    for alert in alerts():
        name = alert["alert"]
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"]["runbook"] == f"cluster/README.md, {name}"
        assert PAGE.count(f"\n| `{name}` |") == 1, name


def checked(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_alert_rules() -> None:
    checked(tool("promtool"), "check", "rules", str(WATCH / "alerts.yml"))


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-kubernetes.yml"])
def test_promtool_takes_the_configuration(name: str) -> None:
    checked(tool("promtool"), "check", "config", str(WATCH / name))


def test_promtool_takes_the_configuration_that_reads_the_api(tmp_path: Path) -> None:
    key_file, file = tmp_path / "key", tmp_path / "prometheus.yml"
    key_file.write_text("rh-key\n")
    file.write_text(yaml.safe_dump(of_service(8000, key_file)))
    checked(tool("promtool"), "check", "config", str(file))


def test_amtool_takes_the_routes_of_the_alerts() -> None:
    checked(tool("amtool"), "check-config", str(WATCH / "alertmanager.yml"))


def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    checked(tool("promtool"), "test", "rules", str(ROOT / "tests" / "cluster" / "alerts_test.yml"))


def test_promtool_takes_what_is_written_for_a_service_of_this_machine(tmp_path: Path) -> None:
    command = start.prometheus(tmp_path, start.prometheus_config(tmp_path / "nodes.json"), 1)
    (file,) = [word.partition("=")[2] for word in command if word.startswith("--config.file")]
    checked(tool("promtool"), "check", "config", file)


def test_grafana_is_told_where_the_boards_and_prometheus_are(tmp_path: Path) -> None:
    start.grafana(tmp_path, 3000, 9191)
    provisioning = tmp_path / "provisioning"
    assert f"provisioning = {provisioning}\n" in (tmp_path / "grafana.ini").read_text()
    assert f"path: {WATCH / 'boards'}\n" in (provisioning / "dashboards" / "roundhouse.yml").read_text()
    assert "url: http://127.0.0.1:9191\n" in (provisioning / "datasources" / "prometheus.yml").read_text()


def started(*arguments: str, **variables: str) -> tuple[int, str]:
    """The exit status of `start.py`, and what it said."""
    command = [sys.executable, str(WATCH / "start.py"), *arguments]
    variables = {**environment(), **variables}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_without_prometheus_and_grafana_it_says_how_to_get_them(tmp_path: Path) -> None:
    status, said = started(PATH=str(tmp_path))
    assert (status, said) == (1, "".join(f"{text}\n" for text in start.HOW_TO_GET.values()))


def test_without_a_service_it_says_so(tmp_path: Path) -> None:
    tool("prometheus")
    status, said = started("--port", "1", TMPDIR=str(tmp_path))
    assert status == 1
    assert "No service of yours runs on port 1" in said


def test_a_board_is_json_that_grafana_reads_as_one() -> None:
    for board in boards.BOARDS:
        read = json.loads(grafana.text(board))
        assert read["uid"] == board.uid
        assert {variable["name"] for variable in read["templating"]["list"]} == {"datasource", "model"}
