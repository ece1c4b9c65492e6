"""A service without Ray in a process of its own, which a test may kill (`python -m` starts it).

It reads its configuration as one line of JSON, prints its port, and ends with its standard input.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from engines.fake import FakeConfig
from tests.support.harness import BASE, CONTEXT, KEY, running_edge
from tests.support.processes.running_up import ROOT


@dataclass
class ServiceProcess:
    """`process.kill()` is a crash; the end of the context is an orderly one."""

    process: subprocess.Popen[str]
    port: int

    def complete(self, prompt: Any = "hi", key: str = KEY, **fields: Any) -> httpx.Response:
        with self.client(key) as client:
            return client.post("/completions", json={"model": BASE, "prompt": prompt, **fields})

    def client(self, key: str = KEY) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}/v1", headers=headers, timeout=60, verify=False)


@contextmanager
def service_process(config: dict[str, Any]) -> Iterator[ServiceProcess]:
    command = [sys.executable, "-m", "tests.support.ledger.ledger_service"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(config) + "\n")
        process.stdin.flush()
        yield ServiceProcess(process, int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    config = json.loads(sys.stdin.readline())
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as edge:
        sys.stdout.write(f"{edge.port}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
