"""The product's first promise, as a newcomer meets it: a fresh checkout, `make serve`, the README's snippets, Ctrl-C.

A virtual environment is made and everything is installed, so this takes minutes.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve_app.config.deploy import free_port
from tests.support.readme_blocks import ROOT, Block, blocks, environment, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAYS = {  # by what they ask for, in the order of the page
    "curl -s": "The code word is zephyr-42. -- Quill",
    "serve_app check": "The code word is zephyr-42. -- Quill",
    "for model in": "tinker://demo/sampler_weights/quill says The code word is zephyr-42. -- Quill",
    "stream=True": 'call: get_weather {"city": "Paris"}',
    "temp_c": "It is 18 °C in Paris.",
    "return_token_ids": "Paris",
    "What colour is the shape?": "red",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the project, as `git clone` would bring them, and nothing that was made from them."""
    folder = tmp_path_factory.mktemp("fresh")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@contextmanager
def serving(checkout: Path, port: int) -> Iterator[list[str]]:
    """`make serve` in a session of its own, like a terminal; what it prints until it is ready. Ends it by Ctrl-C."""
    command = ["make", "serve", f"PORT={port}"]
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as make:
        assert make.stdout is not None
        printed: list[str] = []
        try:
            for line in make.stdout:
                printed.append(line)
                if line.startswith("  -d "):  # the end of the curl, which is the last that it says
                    break
            yield printed
        finally:
            os.killpg(make.pid, signal.SIGINT)
            printed += make.stdout.readlines()


@pytest.fixture(scope="module")
def address(checkout: Path) -> Iterator[str]:
    port = free_port()
    with serving(checkout, port) as printed:
        assert printed[-1].startswith("  -d "), "".join(printed[-40:])
        (checkout / "first run").write_text("".join(printed))
        yield f"127.0.0.1:{port}"
    assert processes_of(checkout) == []
    assert "Traceback" not in "".join(printed)


def processes_of(checkout: Path) -> list[str]:
    """The command lines of processes that were started from this checkout."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            seen = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # gone, or not ours
            continue
        if bytes(checkout) in seen and process.name != str(os.getpid()):
            found.append(command)
    return found


def test_the_first_run_says_what_it_does_and_how_to_ask(checkout: Path, address: str) -> None:
    text = (checkout / "first run").read_text()
    steps = re.findall(r"^==> (\w+)", text, re.MULTILINE)
    assert steps[:6] == ["Creating", "Installing", "Installing", "Fetching", "Converting", "Checking"]
    assert address in text
    assert "roundhouse-demo" in text


@pytest.mark.parametrize("block", blocks("service"), ids=str)
def test_a_snippet_of_the_readme_says_what_is_promised(block: Block, checkout: Path, address: str) -> None:
    """In the environment that `make serve` made: no tool of the developers is there."""
    wanted = [says for asks, says in SAYS.items() if asks in block.text][-1]
    assert wanted in run(block, address, checkout)


def test_the_command_that_was_printed_works(checkout: Path, address: str) -> None:
    text = (checkout / "first run").read_text()
    command = text[text.rindex("\ncurl ") :]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert '"choices"' in done.stdout, done.stdout + done.stderr


def test_a_checkpoint_can_be_sampled_in_the_next_request_while_training_goes_on(checkout: Path, address: str) -> None:
    host, port = address.split(":")
    command = ["make", "example", f"HOST={host}", f"PORT={port}", "ARGS=--steps 24 --save-every 8"]
    done = subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True, timeout=1200)
    lines = [line for line in done.stdout.splitlines() if "tinker://" in line and "step" in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [int(line.split()[1]) for line in lines] == [8, 16, 24]
    assert "zephyr-42" in lines[-1]


def test_a_second_run_installs_and_converts_nothing(checkout: Path, address: str) -> None:
    command = ["make", "setup", "demo"]
    done = subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Installing" not in done.stdout
    assert "Converting" not in done.stdout
