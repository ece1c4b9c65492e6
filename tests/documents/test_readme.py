"""The README keeps what it says: its snippets, tables and links are checked against the code."""

import ast
import json
import re
import subprocess
import tomllib
from functools import cache
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
_ROOMS = (
    "serve_app/images",
    "serve_app/ledger",
    "serve_app/marketplace",
    "cluster/examples",
    "tests/bench",
    "tests/clients",
)
PAGES += [ROOT / folder / "README.md" for folder in _ROOMS]
PAGES += [ROOT / "engines" / "DECISIONS.md", ROOT / "serve_app" / "config" / "OPTIONS.md"]
PACKAGES = ("serve_app", "engines", "renderers", "cluster", "tests")
OF_OTHERS = {"chat_template.jinja", "checkpoint.json", "extra-openai-models.yaml"}
"""Files that checkpoints and clients have."""
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
    ("yaml", "marketplace"): "test_marketplace.py",
    ("python", "marketplace"): "test_marketplace.py",
    ("bash", "marketplace"): "test_marketplace.py",
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


@cache
def tree() -> list[str]:
    """Every file and folder of the packages, from the root, each between slashes."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if "node_modules" not in path.parts)
    return [f"/{path.relative_to(ROOT)}/" for path in files]


def is_there(name: str, page: Path) -> bool:
    """From the root, or anywhere below the page's folder: pages leave out what their readers know."""
    below = f"/{page.parent.relative_to(ROOT)}/".replace("/./", "/")
    return (ROOT / name).exists() or any(
        path.startswith(below) and path.endswith(f"/{name.rstrip('/')}/") for path in tree()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    in_backticks = re.findall(r"`([\w.][\w./-]*(?:/|\.(?:py|md|sh|yaml|toml|txt|json|js|jinja)))`", text)
    from_the_root = re.findall(rf"(?<![\w/.])((?:{'|'.join(PACKAGES)})/[\w./-]*\w)", text)
    assert [name for name in {*in_backticks, *from_the_root} - OF_OTHERS if not is_there(name, page)] == []


def rooms_on_the_page_of(package: str) -> list[set[str]]:
    """By row of its table."""
    page = (ROOT / package / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\n\| rooms? \|[^\n]*\n\|---[^\n]*\n(.*?)\n\n", page, re.DOTALL)
    return [set(re.findall(r"`(\w+)(?:/[\w/]*)?`", row.split("|")[1])) for row in table.splitlines()]


def rooms_that_are_enforced(package: str) -> list[set[str]]:
    """By layer; import-linter finds those that a list lacks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == [package]]
    return [set(layer.split(" | ")) for layer in layers]


def test_the_rooms_of_the_service_stand_in_the_order_that_is_enforced() -> None:
    assert rooms_on_the_page_of("serve_app") == rooms_that_are_enforced("serve_app")


def test_the_page_on_the_engine_names_every_room() -> None:
    assert set().union(*rooms_on_the_page_of("engines")) == set().union(*rooms_that_are_enforced("engines"))


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
    (table,) = re.findall(r"\n\| `support/` \|.*?\n\n", page, re.DOTALL)
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    support = ROOT / "tests" / "support"
    files = {str(path.relative_to(support)) for path in support.rglob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"`([\w/]+\.py)`", " ".join(rows))) == files
