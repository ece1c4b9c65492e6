"""The document's sample for openai-node, as it stands (`make test-clients`)."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.harness import RunningEdge
from tests.support.marketplace.slugs import SLUG, Sell, local, remote
from tests.support.marketplace.upstream import running_upstream
from tests.support.sample_code import sample

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")
pytestmark = [pytest.mark.clients]

NODE = Path(__file__).parent / "node"
ASK_KEY = "ask_an-inference-key"
TEXT = " red, yellow and blue."


@pytest.mark.skipif(shutil.which("node") is None, reason="openai-node needs node, and this machine has none")
@pytest.mark.parametrize("where", ["local", "remote"])
def test_the_marketplaces_javascript_prints_the_text(edge: RunningEdge, sell: Sell, where: str) -> None:
    assert (NODE / "node_modules" / "openai").is_dir(), f"{NODE} has no node_modules: run `make test-clients`."
    edge.script.says(TEXT)
    key = {"name": "ask", "sha256": hashlib.sha256(ASK_KEY.encode()).hexdigest(), "models": [SLUG]}
    options = json.dumps({"baseURL": edge.url, "apiKey": ASK_KEY})
    code = f'import OpenAI from "openai";\nconst client = new OpenAI({options});\n'
    code += sample("marketplace_stream.mjs", text_model=SLUG)
    with running_upstream() as upstream:
        sell(local("it") if where == "local" else remote("it", upstream.url), changes={"keys": [key]})
        assert_prints(code)


def assert_prints(code: str) -> None:
    command = ["node", "--input-type=module", "--eval", code]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (TEXT, 0), done.stderr
