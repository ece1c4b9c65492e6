"""The Serve configurations for a cluster are valid, for Serve and for us."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.base.errors import ConfigRefused
from serve_app.cli.check import check, check_file
from serve_app.config.api import ApiArgs
from serve_app.config.model import ModelArgs
from tests.support.readme_blocks import ROOT

SERVE = ROOT / "cluster" / "serve"
PRODUCTION, DEVELOPMENT = SERVE / "production.yaml", SERVE / "development.yaml"


def variables(path: Path) -> dict[str, str]:
    raw: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    found: dict[str, str] = raw["controller_options"]["runtime_env"]["env_vars"]
    return found


def test_the_development_configuration_could_start_here() -> None:
    assert check(DEVELOPMENT).model_ids == ["roundhouse/tiny-vision"]


def test_what_the_production_configuration_lacks_here_are_its_models_and_its_checkpoints() -> None:
    with pytest.raises(ConfigRefused) as refusal:
        check(PRODUCTION)
    lacking = {line.rpartition("'/")[2].rstrip("'.") for line in str(refusal.value).splitlines()}
    assert lacking == {"models/Qwen3-8B", "models/Qwen3-32B", "checkpoints"}


def test_the_production_configuration_could_start_where_they_are(tmp_path: Path) -> None:
    text = PRODUCTION.read_text(encoding="utf-8")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "models").mkdir()
    for name in ("Qwen3-8B", "Qwen3-32B"):
        (tmp_path / "models" / name).symlink_to(ROOT / "cluster" / "examples" / "tiny-vision")
    # That model's context is too short for the variant.
    here = text.replace('variants: {"peft:32768": 32768}', "variants: {}")
    for folder in ("/models/", "/checkpoints]"):
        here = here.replace(f" {folder}", f" {tmp_path}{folder}").replace(f"[{folder}", f"[{tmp_path}{folder}")
    (tmp_path / "config.yaml").write_text(here, encoding="utf-8")
    assert check(tmp_path / "config.yaml").model_ids == ["Qwen/Qwen3-8B", "Qwen/Qwen3-32B"]


def test_production_has_two_ingresses_and_models_that_scale_one_of_them_to_zero() -> None:
    apps = check_file(PRODUCTION).apps
    assert [args.replicas.min for args in apps.values() if isinstance(args, ApiArgs)] == [2]
    replicas = [args.replicas for args in apps.values() if isinstance(args, ModelArgs)]
    assert [(model.min, model.max) for model in replicas] == [(1, 8), (0, 2)]


def test_production_takes_over_every_variable_of_the_demo() -> None:
    of_cluster = {"ROUNDHOUSE_CONNECTIONS_PER_SOURCE": "0"}
    assert variables(PRODUCTION) == variables(ROOT / "config.yaml") | of_cluster


def test_development_takes_over_the_demos_variables_but_those_for_long_streams_and_many_callers() -> None:
    demo, development = variables(ROOT / "config.yaml"), variables(DEVELOPMENT)
    assert development.items() <= demo.items()
    assert demo.keys() - development.keys() == {
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
        "RAY_SERVE_HAPROXY_MAXCONN",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S",
    }


@pytest.mark.parametrize("path", [PRODUCTION, DEVELOPMENT], ids=lambda path: path.stem)
def test_as_it_stands_a_configuration_for_a_cluster_lets_nobody_in(path: Path) -> None:
    service = check_file(path).service
    assert service is not None
    # Nobody knows a text with such a hash.
    assert all(key.sha256 is not None and key.sha256.startswith("0" * 60) for key in service.keys)
