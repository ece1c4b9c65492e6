"""Simon Willison's `llm`: the command, with the models that `extra-openai-models.yaml` names, and its Python side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from service import BASE, CODE_WORD, CODE_WORD_ANSWER, KEY, PARIS, QUILL, TOOLS, URL

QUESTION = CODE_WORD[0]["content"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user of `llm` writes to use the service."""
    home = tmp_path_factory.mktemp("llm")
    models = [
        {"model_id": "quill", "model_name": QUILL, "api_base": URL, "api_key_name": "roundhouse"},
        {
            "model_id": "tools",
            "model_name": TOOLS,
            "api_base": URL,
            "api_key_name": "roundhouse",
            "supports_tools": True,
        },
        {
            "model_id": "base",
            "model_name": BASE,
            "api_base": URL,
            "api_key_name": "roundhouse",
            "completion": True,
        },
    ]
    (home / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    (home / "keys.json").write_text(json.dumps({"roundhouse": KEY}))
    (home / "weather.py").write_text(
        'def get_weather(city: str) -> str:\n    "Get the current weather in a city."\n    return \'{"temp_c": 18}\'\n'
    )
    return home


def llm(home: Path, *arguments: str, status: int = 0) -> str:
    """What `llm` prints; its error output where it is to fail."""
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "LLM_USER_PATH": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    return (done.stderr if status else done.stdout).strip()


def test_the_models_are_listed(home):
    listed = llm(home, "models")
    assert "quill" in listed
    assert "tools" in listed


@pytest.mark.parametrize("how", [(), ("--no-stream",)])
def test_a_prompt_is_answered(home, how):
    assert llm(home, "-m", "quill", "-o", "temperature", "0", *how, QUESTION) == CODE_WORD_ANSWER


def test_a_conversation_goes_on(home):
    llm(home, "-m", "quill", "-o", "temperature", "0", "Hello!")
    assert llm(home, "-c", "-o", "temperature", "0", QUESTION) == CODE_WORD_ANSWER


def test_a_function_is_called_and_its_result_answered(home):
    functions = ("--functions", str(home / "weather.py"))
    asked = ("-m", "tools", "-o", "temperature", "0", *functions, PARIS[0]["content"])
    assert "18" in llm(home, *asked)
    assert "18" in llm(home, "--no-stream", *asked)


def test_what_was_said_is_logged_with_its_usage(home):
    llm(home, "-m", "quill", "-o", "temperature", "0", QUESTION)
    (entry,) = json.loads(llm(home, "logs", "-n", "1", "--json"))
    assert (entry["model"], entry["response"]) == ("quill", CODE_WORD_ANSWER)
    assert entry["input_tokens"] > 0
    assert entry["output_tokens"] > 0


def test_a_base_model_completes_text(home):
    answer = llm(home, "-m", "base", "-o", "temperature", "0", "-o", "max_tokens", "8", "The capital of France is")
    assert "Paris" in answer


def test_a_refusal_is_shown(home):
    assert "temperature" in llm(home, "-m", "quill", "-o", "temperature", "-1", QUESTION, status=1)
