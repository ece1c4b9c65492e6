"""`make` installs once, and again when what is to be installed changes."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.readme_blocks import ROOT, environment

FAKE_PYTHON = """#!/bin/bash
echo "$*" >> "$(dirname "$0")/calls"
[[ ! -e "$(dirname "$0")/fails" ]]
"""


class Checkout:
    """The files that `make` reads, with an interpreter that writes down what it is called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.bin = folder / ".venv" / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "python").write_text(FAKE_PYTHON)
        (self.bin / "python").chmod(0o755)

    def make(self, *arguments: str) -> tuple[int, list[str]]:
        """The exit status, and what the interpreter was called with."""
        (self.bin / "calls").write_text("")
        command = ["make", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=60)
        return done.returncode, (self.bin / "calls").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def installs(extra: str, torch: str = "torch==2.13.0") -> list[str]:
    pip = "-m pip --disable-pip-version-check install -c .venv/constraints.txt"
    return [f"{pip} {torch}", f"{pip} -e .[{extra}]"]


def test_the_first_run_installs_torch_and_then_the_package_and_the_second_nothing(checkout: Checkout) -> None:
    assert checkout.make("setup") == (0, installs("demo"))
    assert checkout.make("setup") == (0, [])


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_to_be_installed_installs_again(checkout: Checkout, name: str) -> None:
    checkout.make("setup")
    with (checkout.folder / name).open("a") as file:
        file.write("\n# changed\n")
    assert checkout.make("setup") == (0, installs("demo"))


def test_what_the_tests_need_is_installed_beside_what_the_service_needs(checkout: Checkout) -> None:
    checkout.make("setup")
    assert checkout.make("setup-dev") == (0, installs("dev"))
    assert checkout.make("setup-dev", "setup") == (0, [])


def test_the_development_set_up_is_enough_for_the_service(checkout: Checkout) -> None:
    assert checkout.make("setup-dev", "setup") == (0, installs("dev"))
    assert checkout.make("setup") == (0, [])


def test_two_checkouts_that_share_an_environment_take_it_over_from_each_other(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    one, other = Checkout(tmp_path / "a"), Checkout(tmp_path / "b")
    shared = f"VENV={one.folder}/.venv"
    pip = f"-m pip --disable-pip-version-check install -c {one.folder}/.venv/constraints.txt"
    installed = [f"{pip} torch==2.13.0", f"{pip} -e .[dev]"]
    for checkout in (one, other, one):
        (one.bin / "calls").write_text("")
        checkout.make("setup-dev", shared)
        assert (one.bin / "calls").read_text().splitlines() == installed
    assert one.make("setup-dev", shared) == (0, [])


def test_an_installation_that_failed_is_tried_again(checkout: Checkout) -> None:
    (checkout.bin / "fails").touch()
    assert checkout.make("setup") == (2, installs("demo")[:1])
    (checkout.bin / "fails").unlink()
    assert checkout.make("setup") == (0, installs("demo"))


def test_another_torch_can_be_named_and_the_pins_do_not_contradict_it(checkout: Checkout) -> None:
    other = "torch==2.14.1 --index-url file:///builds"
    assert checkout.make("setup", f"TORCH={other}") == (0, installs("demo", other))
    pins = (checkout.folder / ".venv" / "constraints.txt").read_text().splitlines()
    assert {*pins} == {*(ROOT / "constraints.txt").read_text().splitlines()} - {"torch==2.13.0"}


def test_serve_prepares_the_demo_and_runs_on_the_address_that_is_named(checkout: Checkout) -> None:
    checkout.make("setup")
    run = "-m serve_app up --config config.yaml --host {} --port {}"
    assert checkout.make("serve") == (0, ["cluster/prepare_demo.py", run.format("127.0.0.1", "8000")])
    assert checkout.make("serve", "HOST=0.0.0.0", "PORT=9000")[1][1:] == [run.format("0.0.0.0", "9000")]


def test_tests_run_on_two_workers_or_on_as_many_as_are_named(checkout: Checkout) -> None:
    checkout.make("setup-dev")
    run = "-m pytest -n {} -m slow and not gpu and not alone"
    alone = "-m pytest -m slow and alone"
    assert checkout.make("test-slow") == (0, ["cluster/prepare_demo.py", run.format(2), alone])
    assert checkout.make("test-slow", "WORKERS=5") == (0, ["cluster/prepare_demo.py", run.format(5), alone])


def test_a_make_that_runs_the_tests_does_not_hand_on_its_variables(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAKEFLAGS", " -- VENV=elsewhere")
    monkeypatch.setenv("VENV", "elsewhere")
    assert checkout.make("setup") == (0, installs("demo"))


def test_without_a_new_enough_python_it_says_so(checkout: Checkout) -> None:
    command = ["make", "setup", "PYTHON=", "VENV=elsewhere"]
    done = subprocess.run(command, cwd=checkout.folder, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" in done.stdout


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_every_pin_is_one_exact_version_without_a_build_or_a_host() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)] == []
    assert len(pins()) == len(lines)


def test_every_dependency_has_a_pin_that_fits_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(need for extra in project["optional-dependencies"].values() for need in extra),
    ]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement
