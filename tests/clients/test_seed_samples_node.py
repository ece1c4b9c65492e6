"""The document's sample for openai-node, as it stands (`make test-clients`)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.harness import BASE, KEY, RunningEdge
from tests.support.sample_code import sample

pytest_plugins = ("tests.support.edge_fixtures",)
pytestmark = [pytest.mark.clients]

NODE = Path(__file__).parent / "node"
TEXT = " red, yellow and blue."


@pytest.mark.skipif(shutil.which("node") is None, reason="openai-node needs node, and this machine has none")
def test_the_marketplaces_javascript_prints_the_text(edge: RunningEdge) -> None:
    assert (NODE / "node_modules" / "openai").is_dir(), f"{NODE} has no node_modules: run `make test-clients`."
    edge.script.says(TEXT)
    options = json.dumps({"baseURL": edge.url, "apiKey": KEY})
    code = f'import OpenAI from "openai";\nconst client = new OpenAI({options});\n'
    code += sample("marketplace_stream.mjs", text_model=BASE)
    command = ["node", "--input-type=module", "--eval", code]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (TEXT, 0), done.stderr
