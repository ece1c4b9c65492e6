"""The README's section on the marketplace: its configuration is taken, and its snippets run against it."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from serve_app.config.keys import DEMO_KEY
from serve_app.config.service import parse_config
from tests.support.harness import CHAT, RunningEdge
from tests.support.marketplace.upstream import running_upstream
from tests.support.marketplace.upstream_replies import TEXTS
from tests.support.readme_blocks import ADDRESS, ROOT, Block, blocks
from tests.support.sample_code import environment

pytest_plugins = ("tests.support.edge_fixtures",)

(CONFIG,) = blocks("marketplace", language="yaml")
(PYTHON,) = blocks("marketplace", language="python")
(CURL,) = blocks("marketplace", language="bash")
DEMO_CONFIG = (ROOT / "config.yaml").read_text(encoding="utf-8")
SLUG = "acme/assistant"
REMOTE = {"far"}


@pytest.fixture
def edge(edge: RunningEdge, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningEdge]:
    """The section's configuration, with a model and an upstream that are there, and the demo's key."""
    monkeypatch.setenv("EXAMPLE_API_KEY", "sk-the-key-of-the-example")
    key = {"name": "demo", "sha256": hashlib.sha256(DEMO_KEY.encode()).hexdigest()}
    with running_upstream() as upstream:
        text = CONFIG.text.replace("HuggingFaceTB/SmolLM2-135M-Instruct", CHAT)
        marketplace = yaml.safe_load(text)["marketplace"]
        for endpoint in marketplace["slugs"][0]["endpoints"]:
            if endpoint["name"] in REMOTE:
                endpoint["upstream"] |= {"url": upstream.url, "allow_private": True}
        edge.reconfigure(marketplace=marketplace, keys=[key])
        assert edge.service.config_error is None
        yield edge
        edge.reconfigure()


def run(block: Block, edge: RunningEdge) -> str:
    text = block.text.replace(ADDRESS, f"127.0.0.1:{edge.port}")
    command = [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, env=environment(DEMO_KEY) | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commented() -> Any:
    """The example in config.yaml, without its comment signs."""
    lines = re.findall(r"^ {10}# (marketplace:$|  .*)$", DEMO_CONFIG, re.MULTILINE)
    return yaml.safe_load("\n".join(lines))


def test_the_example_in_config_yaml_is_that_of_the_readme() -> None:
    assert commented() == yaml.safe_load(CONFIG.text)


def test_the_demos_configuration_takes_it() -> None:
    api = yaml.safe_load(DEMO_CONFIG)["applications"][0]["deployments"][0]["user_config"]
    config = parse_config({**api, **commented()})
    assert [slug.id for slug in config.marketplace.slugs] == [SLUG]


def test_the_python_snippet_prints_what_an_affordable_endpoint_says(edge: RunningEdge) -> None:
    edge.script.says("Hello back!")
    assert run(PYTHON, edge) == "Hello back!"
    edge.wait_until_idle()
    assert edge.recorder.ended[-1].endpoint == "here"


def test_without_the_limit_the_remote_endpoint_answers_where_it_is_asked_for(edge: RunningEdge) -> None:
    with edge.sdk(DEMO_KEY) as client:
        messages: Any = [{"role": "user", "content": "Hello!"}]
        stream = client.chat.completions.create(model=f"{SLUG}/ep/far", messages=messages, stream=True)
        said = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(said) == "".join(TEXTS)


def test_the_curl_command_lists_both_endpoints(edge: RunningEdge) -> None:
    listed = json.loads(run(CURL, edge))["data"]
    prices = [(item["name"], item["price"]["prompt"], item["price"]["completion"], item["local"]) for item in listed]
    assert prices == [("here", "0.1", "0.4", True), ("far", "0.15", "0.6", False)]
