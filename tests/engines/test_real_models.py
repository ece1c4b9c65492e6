"""Real weights: the engine's tokens and log-probabilities against transformers' own, and PEFT's, in float32.

The demo model is made by `make demo`. gemma-3-270m comes from the hub (a token whose owner took the licence, or a hub
cache that has it): `pytest -m hub`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.engines.engine_harness import DrivenEngine, engine_config, reference_logits, request
from tests.support.files.lora_files import adapter_at
from tests.support.processes.demo_modules import ROOT

DEMO = str(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
GEMMA = "google/gemma-3-270m"
CHECKPOINTS = [ROOT / "cluster" / "examples" / "checkpoints" / name for name in ("quill", "tools")]
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Grüße aus 東京! 🚂",
    "Once upon a time there was an engine that served many models. " * 40,  # longer than gemma's window of 512
)


@pytest.mark.parametrize(
    ("source", "checkpoints"),
    [
        pytest.param(DEMO, (None, *CHECKPOINTS), marks=pytest.mark.slow, id="demo"),
        pytest.param(GEMMA, (None,), marks=pytest.mark.hub, id="gemma"),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_transformers(
    source: str, checkpoints: tuple[Path | None, ...]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    asked = [
        (request(prompt, adapter=adapter_at(folder) if folder else None, max_tokens=24, logprobs=1), folder)
        for folder in checkpoints
        for prompt in prompts
    ]
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 1 << 29, "max_step_tokens": 200}
    with DrivenEngine(engine_config(source=source, **settings)) as engine:
        results = engine.generate(*(made for made, _ in asked))
    models = dict(references(source, checkpoints))
    for (made, folder), result in zip(asked, results, strict=True):
        assert result.error is None
        text = (*made.prompt_token_ids, *result.token_ids)
        with torch.inference_mode():
            rows = torch.log_softmax(reference_logits(models[folder], text), -1)[len(made.prompt_token_ids) - 1 : -1]
        own = rows[torch.arange(len(result.token_ids)), result.token_ids]
        assert len(result.token_ids) == 24
        assert (rows.amax(-1) - own).max() < 1e-3
        assert [score.logprob for score in result.logprobs] == pytest.approx(own.tolist(), abs=2e-3)


def references(source: str, checkpoints: tuple[Path | None, ...]) -> Iterator[tuple[Path | None, Any]]:
    for folder in checkpoints:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        yield folder, PeftModel.from_pretrained(model, folder).eval() if folder else model
