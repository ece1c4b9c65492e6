"""lm-evaluation-harness, as its users start it, and what transformers and PEFT compute for the same texts."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.client_service import MODEL_FOLDER, ClientService
from tests.clients.docstrings import Docstring

TASKS = Path(__file__).parent / "tasks"
BATCH = 16


@dataclass(frozen=True)
class Evaluation:
    """Log-likelihoods in nats. Of all texts: of the continuation, and whether each of its tokens was the most likely
    one. Of the few that the other two tasks take: of the whole text, and what a model writes after the context.
    """

    continuations: list[float]
    are_greedy: list[bool]
    whole: list[float]
    generations: list[str]


def differences(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


def evaluate(
    lm_eval: Path, service: ClientService, folder: Path, model: str, *, texts: Sequence[Docstring], few: int
) -> Evaluation:
    """Run the three tasks of `tasks/` against the service. Token ids go there, for all tokenizing is lm-eval's."""
    for name, chosen in (("docstrings.jsonl", texts), ("few.jsonl", texts[:few])):
        (folder / name).write_text("".join(json.dumps(asdict(text)) + "\n" for text in chosen))
    arguments = f"model={model},base_url={service.url}/completions,tokenizer={MODEL_FOLDER},num_concurrent=8"
    tasks = ("docstring_continuations", "docstrings_whole", "docstring_generations")
    command = [str(lm_eval), "run", "--model", "local-completions", "--model_args", arguments]
    command += ["--include_path", str(TASKS), "--tasks", *tasks, "--log_samples", "--output_path", "out"]
    environment = {**service.environment(), "OPENAI_API_KEY": service.environment()["ROUNDHOUSE_KEY"]}
    environment |= {"HF_HOME": str(folder / "hf"), "TQDM_DISABLE": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=600)
    continuations, whole, generations = (_responses(folder, task) for task in tasks)
    return Evaluation(
        [float(nats) for nats, _ in continuations],
        [greedy == "True" for _, greedy in continuations],
        list(map(float, whole)),
        generations,
    )


def _responses(folder: Path, task: str) -> list[Any]:
    (file,) = folder.glob(f"out/*/samples_{task}_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"][0] for sample in samples]


class Reference:
    """The same by transformers, and by PEFT for an adapter."""

    def __init__(self, dtype: torch.dtype, adapter: Path | None = None) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
        self._model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=dtype).eval()
        if adapter is not None:
            from peft import PeftModel

            self._model = PeftModel.from_pretrained(self._model, adapter).eval()

    def evaluate(self, texts: Sequence[Docstring], *, few: int) -> Evaluation:
        pairs = [(self._ids(text.context + text.continuation), len(self._ids(text.context))) for text in texts]
        begin = self._tokenizer.bos_token_id  # what stands before a text whose first token is to be scored
        whole = self._score([([begin, *ids], 1) for ids, _ in pairs[:few]])
        continuations, are_greedy = zip(*self._score(pairs), strict=True)
        generations = [self._generate(ids[:given]) for ids, given in pairs[:few]]
        return Evaluation(list(continuations), list(are_greedy), [nats for nats, _ in whole], generations)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    @torch.inference_mode()
    def _generate(self, ids: list[int]) -> str:
        """As `tasks/generations.yaml` has it."""
        prompt = torch.tensor([ids])
        made = self._model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
        )
        return str(self._tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)).split("\n")[0]

    def _score(self, pairs: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Each of token ids and how many of them are given."""
        by_length = sorted(range(len(pairs)), key=lambda index: len(pairs[index][0]))
        scores: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(pairs), BATCH):
            chosen = by_length[start : start + BATCH]
            scores |= zip(chosen, self._score_batch([pairs[index] for index in chosen]), strict=True)
        return [scores[index] for index in range(len(pairs))]

    @torch.inference_mode()
    def _score_batch(self, pairs: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        longest = max(len(ids) for ids, _ in pairs)
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in pairs])  # what follows changes nothing
        logits = self._model(padded).logits  # [texts, tokens, vocabulary]
        for (ids, given), row in zip(pairs, logits, strict=True):
            logprobs = row[given - 1 : len(ids) - 1].float().log_softmax(-1)
            targets = torch.tensor(ids[given:])
            nats = logprobs.gather(1, targets[:, None]).double().sum().item()
            yield nats, bool((logprobs.argmax(-1) == targets).all())
