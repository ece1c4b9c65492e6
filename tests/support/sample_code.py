"""The samples of the API's public documents, as they stand there. Only the host, the key and the model are replaced."""

import os
import shlex
import subprocess
from pathlib import Path
from string import Template
from typing import Any

import httpx

_FOLDER = Path(__file__).parents[1] / "documents" / "seed_samples"
_HOSTS = ("https://tinker.thinkingmachines.dev", "https://inference.tokenchange.io")
_KEYS = ("TINKER_API_KEY", "TOKENCHANGE_API_KEY")
_CHAT_MODEL = "thinkingmachines/Inkling:peft:262144"
_TEXT_MODELS = ("Qwen/Qwen3.5-9B-Base", "<model-slug>")


def sample(name: str, *, host: str = "", chat_model: str = "", text_model: str = "") -> str:
    """The text of a sample. `host`: without a path."""
    text = (_FOLDER / name).read_text(encoding="utf-8")
    for old in _HOSTS:
        text = text.replace(old, host or old)
    for old in _TEXT_MODELS:
        text = text.replace(old, text_model or old)
    return text.replace(_CHAT_MODEL, chat_model or _CHAT_MODEL)


def run_python(code: str, **names: Any) -> dict[str, Any]:
    """Run a sample that uses these names; all names that it leaves behind."""
    exec(compile(code, "sample", "exec"), names)
    return names


def environment(key: str) -> dict[str, str]:
    """The variables that samples take the key from, and no proxy in between."""
    return {**dict.fromkeys(_KEYS, key), "NO_PROXY": "*", "no_proxy": "*"}


def run_curl(script: str, key: str) -> str:
    """What the command prints."""
    command = ["sh", "-c", script]
    done = subprocess.run(command, env=os.environ | environment(key), capture_output=True, timeout=60, check=True)
    return done.stdout.decode()


def send_as_curl(script: str, key: str) -> str:
    """The same request without curl."""
    command, url, *words = shlex.split(script.replace("\\\n", " "))
    assert command == "curl"
    headers, content = {}, ""
    for option, word in zip(words[::2], words[1::2], strict=True):
        if option == "-H":
            name, _, value = Template(word).substitute(environment(key)).partition(": ")
            headers[name] = value
        else:
            assert option == "-d"
            content = word
    return httpx.post(url, headers=headers, content=content.encode(), timeout=30, verify=False).text
