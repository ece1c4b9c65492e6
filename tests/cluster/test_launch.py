"""The files for `ray up`, by Ray's own checks. tests/e2e/test_up_cluster.py runs the one for machines that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts import scripts

from serve_app.cli.check import check_file
from serve_app.config.model import ModelArgs
from tests.support.readme_blocks import ROOT

LAUNCH = ROOT / "cluster" / "launch"
FILES = sorted(LAUNCH.glob("*.yaml"))
SAME = ("head_start_ray_commands", "worker_start_ray_commands", "rsync_exclude", "file_mounts")
CLOUDS = [path for path in FILES if path.stem != "on-premise"]


def read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def commands(path: Path) -> list[str]:
    return [command for name, section in read(path).items() if name.endswith("commands") for command in section]


def named(path: Path) -> str:
    return path.stem


def test_there_is_a_file_for_each_cloud_and_for_machines_that_are_there() -> None:
    assert [path.stem for path in FILES] == ["aws", "azure", "gcp", "on-premise"]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_ray_takes_the_file(path: Path) -> None:
    validate_config(prepare_config(read(path)))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_ray_is_started_with_a_token_and_with_options_that_it_has(path: Path) -> None:
    known = {option for parameter in scripts.start.params for option in parameter.opts}
    starts = [command for command in commands(path) if " start " in command]
    assert len(starts) == 2
    for command in starts:
        assert "RAY_AUTH_MODE=token" in command
        assert "--metrics-export-port=8090" in command
        assert set(re.findall(r"--[a-z-]+", command)) - known == set()
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert read(path)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_machine_is_set_up_by_the_makefile_and_runs_the_ray_of_its_environment(path: Path) -> None:
    assert "make -C ~/roundhouse setup" in commands(path)
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands(path):
        assert re.findall(r"(?<!/bin/)\bray (?:start|stop)", command) == []


@pytest.mark.parametrize("section", SAME)
def test_all_files_say_the_same_of_what_is_the_same_everywhere(section: str) -> None:
    assert [read(path)[section] for path in FILES] == [read(FILES[0])[section]] * len(FILES)


@pytest.mark.parametrize("path", CLOUDS, ids=named)
def test_two_nodes_without_a_gpu_can_run_an_ingress_each_and_all_nodes_are_within_the_limit(path: Path) -> None:
    config = prepare_config(read(path))
    types = config["available_node_types"]
    assert types["ingress"]["min_workers"] == 1
    assert config["head_node_type"] == "head"
    assert sum(kind["max_workers"] for kind in types.values()) == config["max_workers"]


@pytest.mark.parametrize("name", ["gcp", "azure"])  # Ray looks up what machines of AWS have
def test_a_node_has_the_gpus_that_a_replica_of_the_production_configuration_needs(name: str) -> None:
    apps = check_file(ROOT / "cluster" / "serve" / "production.yaml").apps.values()
    needed = max(args.gpus_per_replica for args in apps if isinstance(args, ModelArgs))
    assert read(LAUNCH / f"{name}.yaml")["available_node_types"]["gpu"]["resources"]["GPU"] >= needed


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_addresses_are_those_that_are_reserved_for_examples(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    addresses = set(re.findall(r"\b\d+\.\d+\.\d+\.\d+(?!\d|\.\w)", text)) - {"127.0.0.1"}
    assert [address for address in addresses if not address.startswith("192.0.2.")] == []
    assert set(re.findall(r"nfs4 (?:-o ro )?(\S+?):", text)) <= {"files.example.internal"}
