"""The page that walks through a deployment, and what it deploys, name only commands and options that exist."""

import re
from pathlib import Path

import click
import pytest
from ray.scripts.scripts import cli as ray
from ray.serve.scripts import cli as serve

from serve_app.cli.commands import main
from tests.support.readme_blocks import ROOT

CLUSTER = ROOT / "cluster"
FILES = [CLUSTER / "README.md", CLUSTER / "Dockerfile", CLUSTER / "roundhouse.service"]
FILES += [*sorted(CLUSTER.glob("launch/*.yaml")), *sorted(CLUSTER.glob("serve/*.yaml"))]
OF_RAY = re.compile(r"(?:^|[`/;] ?|\d )(ray|serve) ([a-z][a-z-]+)([^`;\n]*(?:\n +--[^`;\n]*)*)", re.MULTILINE)
OURS = re.compile(
    r"python\b\"?,? ?\"?-m\"?,? ?\"?serve_app\"?,? ?\"?([a-z]+)(?:\"?,? (new|check|list|warm))?([^`\n&;]*)"
)
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")  # what is run elsewhere


def named(path: Path) -> str:
    return str(path.relative_to(CLUSTER))


def commands_of_ray(path: Path) -> list[tuple[str, str, set[str]]]:
    text = path.read_text(encoding="utf-8")
    return [
        (tool, command, set(re.findall(r"(?<=\s)--[a-z-]+", QUOTED.sub("", rest))))
        for tool, command, rest in OF_RAY.findall(text)
    ]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_ray_and_serve_have_the_commands_with_their_options(path: Path) -> None:
    groups: dict[str, click.Group] = {"ray": ray, "serve": serve}
    for tool, name, options in commands_of_ray(path):
        command = groups[tool].commands[name]
        assert options <= {option for parameter in command.params for option in parameter.opts}, (tool, name)


def test_the_page_walks_through_ray_up() -> None:
    found = {name for tool, name, _ in commands_of_ray(FILES[0]) if tool == "ray"}
    assert found >= {"get-auth-token", "up", "exec", "rsync-up", "list", "drain-node", "down", "dashboard"}


def commands_of_ours(path: Path) -> list[list[str]]:
    text = path.read_text(encoding="utf-8")
    return [
        [command, *filter(None, [second]), *re.findall(r"(?<=[\s\"])--[a-z-]+", rest)]
        for command, second, rest in OURS.findall(text)
    ]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_service_has_the_commands_with_their_options(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands_of_ours(path):
        names = [word for word in words if not word.startswith("--")]
        with pytest.raises(SystemExit) as end:
            main([*names, "--help"])
        assert end.value.code == 0, words
        assert {word for word in words if word.startswith("--")} <= set(
            re.findall(r"--[a-z-]+", capsys.readouterr().out)
        )


def test_the_page_names_the_commands_that_check_deploy_and_make_keys() -> None:
    assert {words[0] for words in commands_of_ours(FILES[0])} == {"check", "deploy", "keys", "checkpoints"}


def test_every_target_of_make_that_the_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named_here = set(re.findall(r"(?:^|`)make ([a-z-]+)", FILES[0].read_text(encoding="utf-8"), re.MULTILINE))
    assert named_here >= {"setup", "dashboards"}
    assert named_here <= targets
