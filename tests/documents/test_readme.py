"""The README keeps what it says: its snippets, tables and links are checked against the code."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.completion import CompletionBody
from serve_app.config.api import parse_api_args
from serve_app.config.model import parse_model_args
from serve_app.config.service import parse_config
from tests.support.readme_blocks import ADDRESS, ROOT, Block, blocks, environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("[a-z]*/README.md"))]
PAGES += [
    ROOT / folder / "README.md" for folder in ("serve_app/images", "serve_app/ledger", "tests/bench", "tests/clients")
]
# What runs a block of each kind; a block of any other kind would be run by nothing.
KINDS = {
    ("bash", "setup"): "test_demo_service.py",
    ("bash", "service"): "test_demo_service.py",
    ("python", "service"): "test_demo_service.py",
    ("bash", "example"): "test_demo_service.py",
    ("bash", "deploy"): "below: it is what `make serve` runs",
    ("bash", "change"): "test_launch.py: it is what `up` prints, and test_up.py runs that",
    ("bash", "develop"): ".ci/run and below",
    ("yaml", "config"): "below",
    ("json", "checkpoint"): "below",
    ("mermaid", ""): "below",
}


def ids(block: Block) -> str:
    return str(block)


def test_every_block_is_of_a_kind_that_something_runs() -> None:
    assert {(block.language, block.tag) for block in blocks()} == set(KINDS)
    assert README.count("\n```") == 2 * len(blocks())


@pytest.mark.parametrize("block", blocks(language="python"), ids=ids)
def test_a_python_snippet_stands_alone_and_names_the_demo(block: Block) -> None:
    ast.parse(block.text)
    assert f'base_url="http://{ADDRESS}/v1", api_key="roundhouse-demo"' in block.text


def test_the_configuration_is_one_that_serve_and_the_service_take() -> None:
    (block,) = blocks("config")
    config = ServeDeploySchema.model_validate(yaml.safe_load(block.text))
    api, model = config.applications
    parse_api_args(api.args)
    parsed = parse_model_args(model.args)
    service = parse_config(api.deployments[0].user_config)
    assert [(served.id, served.app) for served in service.models] == [(parsed.id, model.name)]


def test_the_checkpoint_facts_are_those_that_the_store_reads() -> None:
    (block,) = blocks("checkpoint")
    assert json.loads(block.text).keys() <= {"base_model", "owner", "public", "expires_at", "sha256"}


def test_the_fields_that_the_readme_calls_honoured_are_those_of_the_request_bodies() -> None:
    paragraph = re.search(r"\*\*Honoured\.\*\*(.*?)\n\n", README, re.DOTALL)[1]
    both, chat, completions = re.split(r"On\n?\s*`/(?:chat/)?completions` also:", paragraph)
    named = [set(re.findall(r"`([a-z_]+)`", part)) for part in (both, chat, completions)]
    assert named[0] | named[1] == set(ChatBody.model_fields)
    assert named[0] | named[2] == set(CompletionBody.model_fields)
    assert named[0] == ChatBody.model_fields.keys() & CompletionBody.model_fields.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_project_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_file_and_folder_in_backticks_exists() -> None:
    tree = re.findall(r"`((?:serve_app|engines|renderers|cluster|tests)/[\w/.]*|[\w.]+\.(?:yaml|txt|toml))`", README)
    elsewhere = {"checkpoint.json"}
    assert len(tree) > 8
    assert [name for name in tree if name not in elsewhere and not (ROOT / name).exists()] == []


MAKE_BLOCKS = [block for tag in ("setup", "example", "develop") for block in blocks(tag)]


@pytest.mark.parametrize("line", [line for block in MAKE_BLOCKS for line in block.text.splitlines()])
def test_every_make_command_of_the_readme_is_a_target(line: str, tmp_path: Path) -> None:
    assert line.startswith("make ")
    command = [*line.split(), "--dry-run", f"VENV={tmp_path}"]
    plan = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert plan.returncode == 0, plan.stderr


def test_the_command_of_a_deployment_is_the_one_that_make_serve_runs() -> None:
    (block,) = blocks("deploy")
    command = ["make", "--dry-run", "serve"]
    plan = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert plan.stdout.splitlines()[-1] == f"exec {block.text.strip()}"


def test_the_pages_name_no_path_of_a_machine() -> None:
    for page in PAGES:
        assert re.findall(r"(?<![\w.])/(?:root|home|work|tmp)/\S*", page.read_text(encoding="utf-8")) == []


def test_the_page_on_tests_names_every_file_of_support() -> None:
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / "tests" / "support").glob("*.py")} - {"__init__.py"}
    assert files - set(re.findall(r"`(\w+\.py)`", page)) == set()
