"""What a conversation says and the keys of callers: nowhere but in replies."""

import copy
import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import KEY, MODEL, PLAIN_PREFIX
from tests.support.waiting import eventually

CANARY = "canary-8d42-in-a-coal-mine"


def metrics() -> str:
    """What Prometheus would read of this node."""
    import ray

    (node,) = ray.nodes()
    return httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10).text


def log_files() -> dict[str, str]:
    import ray

    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    return {str(file): file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file()}


def ask(service: Service, key: str, path: str, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{service.url}{path}", json={"model": MODEL, **body}, headers=headers, timeout=30)


@pytest.mark.slow
def test_what_the_checkpoint_store_does_is_in_the_metrics(service, tmp_path):
    config = copy.deepcopy(service.config)
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            deployment["user_config"]["checkpoints"] = {"roots": [str(tmp_path)]}
    service.deploy(config)
    folder = tmp_path / "run" / "sampler_weights" / "1"
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")  # it is complete for nobody, and was looked at

    def read() -> bool:
        reply = ask(service, KEY, "/v1/completions", model="tinker://run/sampler_weights/1", prompt="x")
        if reply.json()["error"]["code"] != "checkpoint_incomplete":
            return False  # the root is not yet in force
        return re.search(r"roundhouse_checkpoint_reads_total\S* [1-9]", metrics()) is not None

    eventually(read, 60)


@pytest.mark.slow
def test_neither_text_nor_keys_are_in_logs_metrics_or_errors(service):
    replies, refusals = [], []
    for prefix in ("/v1", f"{PLAIN_PREFIX}/v1"):
        chat, text = f"{prefix}/chat/completions", f"{prefix}/completions"
        messages = [{"role": "user", "content": CANARY}]
        replies += [
            ask(service, KEY, chat, messages=messages, max_tokens=40, seed=1, stream=stream) for stream in (False, True)
        ]
        replies.append(ask(service, KEY, text, prompt=CANARY, max_tokens=40, echo=True))
        refusals += [
            ask(service, KEY, chat, messages=CANARY),
            ask(service, KEY, chat, messages=[CANARY]),
            ask(service, KEY, text, prompt=[CANARY, CANARY]),
            ask(service, KEY, text, prompt=CANARY, max_tokens=10**6),
            ask(service, CANARY, text, prompt="x"),
        ]
    assert [reply.status_code for reply in replies] == [200] * 6
    assert {refusal.status_code for refusal in refusals} == {400, 401}
    said = replies[0].json()["choices"][0]["message"]["content"][:20]
    assert len(said) == 20, "a shorter one could be anywhere"
    # The last line of the metrics to come: exported every few seconds.
    eventually(lambda: re.search(r'roundhouse_requests_total.*status="401"', metrics()) is not None, 60)
    written = {"metrics": metrics(), "refusals": "".join(refusal.text for refusal in refusals), **log_files()}
    assert any("request_id=" in text and "status=401" in text for text in written.values())
    for secret in (CANARY, KEY, said):
        assert [place for place, text in written.items() if secret in text] == []
