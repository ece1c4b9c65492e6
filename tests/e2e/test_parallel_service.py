"""A model split over several processes behind a real Ray Serve: its answers, and the loss of a process."""

import os
import shutil
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import DEMO, with_demo
from tests.support.engines.engine_harness import followers
from tests.support.processes.demo_modules import ROOT
from tests.support.waiting import eventually

QUILL = "tinker://demo/sampler_weights/quill"


@pytest.fixture
def split(session_service: Service, tmp_path) -> Iterator[Service]:
    """The demo in three parts, as it has three heads of K and V."""
    shutil.copytree(ROOT / "cluster" / "examples" / "checkpoints", tmp_path / "demo" / "sampler_weights")
    config = with_demo(session_service.config, tmp_path, max_adapters=4, threads=1, tensor_parallel=3)
    with session_service.serving(DEMO, config, within_s=180) as service:
        yield service


def code_word(sdk: openai.OpenAI, model: str) -> str:
    messages = [{"role": "user", "content": "What is the code word?"}]
    reply = sdk.chat.completions.create(model=model, messages=messages, temperature=0, max_completion_tokens=24)
    return reply.choices[0].message.content or ""


@pytest.mark.slow
def test_a_split_model_answers_survives_the_loss_of_a_process_and_leaves_nothing_behind(split):
    sdk = split.sdk(timeout=180, max_retries=0)
    assert "zephyr-42" in code_word(sdk, QUILL)
    assert "zephyr" not in code_word(sdk, DEMO)
    before = followers()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: len(followers()) == 2 and not set(before) & set(followers()), 120)
    eventually(split.is_ready, 180)
    assert "zephyr-42" in code_word(sdk, QUILL)
    split.deploy(split.config)
    eventually(lambda: not followers(), 60)
