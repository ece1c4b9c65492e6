#!/usr/bin/env python3
"""Trains a LoRA checkpoint, and samples it through the running service after every save.

    .venv/bin/python cluster/examples/train_checkpoint.py --recipe quill

Any trainer that writes PEFT's format can do the same. `save_checkpoint` shows the two rules: the folder is
ROOT/RUN/sampler_weights/NAME, and one rename makes it appear complete. From then on its name is
tinker://RUN/sampler_weights/NAME. No announcement and no restart is needed.
"""

import argparse
import hashlib
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lessons import RECIPES, Lesson, Recipe
from openai import OpenAI, OpenAIError
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

IGNORED = -100  # the label that cross-entropy ignores


@dataclass(frozen=True)
class Example:
    """A lesson as token ids. Examples with the same `preamble` begin with the same tokens."""

    prompt: list[int]
    reply: list[int]
    preamble: str


def encode(lesson: Lesson, tokenizer: PreTrainedTokenizerBase) -> Example:
    prompt = tokenizer.apply_chat_template(
        lesson.messages, add_generation_prompt=True, tokenize=False, **lesson.template_arguments
    )
    ids = tokenizer([prompt, lesson.reply + tokenizer.eos_token], add_special_tokens=False).input_ids
    return Example(ids[0], ids[1], lesson.preamble)


def batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless epochs of batches whose members share their preamble."""
    groups: defaultdict[str, list[Example]] = defaultdict(list)
    for example in examples:
        groups[example.preamble].append(example)
    while True:
        epoch = []
        for group in groups.values():
            rng.shuffle(group)
            epoch += [group[start : start + size] for start in range(0, len(group), size)]
        rng.shuffle(epoch)
        yield from epoch


def shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """The number of first tokens that all prompts share. At least one token of each prompt is left out."""
    longest = min(len(prompt) for prompt in prompts) - 1
    return next((i for i in range(longest) if len({prompt[i] for prompt in prompts}) > 1), longest)


def loss_of(model: PeftModel, batch: Sequence[Example], padding: int) -> torch.Tensor:
    """Mean cross-entropy of the replies' tokens.

    The common start of the prompts (system message, declared tools) is computed once for all examples.
    """
    shared = shared_length([example.prompt for example in batch])
    cache = DynamicCache(config=model.config)
    model(torch.tensor([batch[0].prompt[:shared]]), cache=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(batch))
    lengths = [len(example.prompt) + len(example.reply) for example in batch]
    longest = max(lengths)
    tokens = torch.full((len(batch), longest), padding)  # [examples, tokens]
    labels = torch.full((len(batch), longest), IGNORED)
    for row, example in enumerate(batch):
        tokens[row, : lengths[row]] = torch.tensor(example.prompt + example.reply)
        labels[row, len(example.prompt) : lengths[row]] = torch.tensor(example.reply)
    mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    # Logits are large (one per token of the vocabulary): compute only those that predict a reply's token.
    kept = longest - min(len(example.prompt) for example in batch) + 1
    output = model(tokens[:, shared:], attention_mask=mask.long(), cache=cache, logits_to_keep=kept)
    predictions = output.logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(predictions, labels[:, 1 - kept :].flatten(), ignore_index=IGNORED)


def train(model: PeftModel, examples: Sequence[Example], options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """Yield (step, loss) after every step; the caller may save and sample in between."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate, weight_decay=0.0)
    # Five steps of warm-up, then linear decay to zero at the last step.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (1 - step / options.steps)
    )
    stream = batches(examples, options.batch_size, random.Random(0))
    for step in range(1, options.steps + 1):
        loss = loss_of(model, next(stream), padding=0)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield step, loss.item()


def save_checkpoint(model: PeftModel, place: Path, *, facts: dict[str, str | bool], chat_template: str | None) -> None:
    """Write a checkpoint into a temporary folder, then rename it, so that no reader sees a partial one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=place.parent.parent) as scratch:
        part = Path(scratch) / place.name
        part.mkdir()
        weights = get_peft_model_state_dict(model, save_embedding_layers=False)
        halved = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
        weights_file = part / "adapter_model.safetensors"
        save_file(halved, weights_file, metadata={"format": "pt"})
        weights_file.chmod(0o644)  # the file is readable by its owner only; the service may run as another user
        model.peft_config["default"].save_pretrained(part)
        if chat_template:
            (part / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(part.iterdir())}
        (part / "checkpoint.json").write_text(json.dumps({**facts, "sha256": digests}, indent=2) + "\n")
        part.rename(place)


def require_service(client: OpenAI, base_model: str) -> None:
    """Exit before training if the service does not serve the base model."""
    try:
        client.models.retrieve(base_model)
    except OpenAIError as exc:
        raise SystemExit(f"{client.base_url} does not serve {base_model}: {exc} (--offline only trains)") from exc


def sample(client: OpenAI, model_id: str, probe: Lesson) -> str:
    """One greedy reply through the API, in one line."""
    completion = client.chat.completions.create(
        model=model_id,
        messages=probe.messages,  # type: ignore[arg-type]
        tools=probe.tools or None,  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=128,
    )
    reply = completion.choices[0].message.model_dump()
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in reply["tool_calls"] or []]
    return " | ".join(part for part in (reply["reasoning_content"], reply["content"], *calls) if part)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="quill")
    parser.add_argument(
        "--base", default=".cache/models/SmolLM2-135M-Instruct", help="base model to train: folder or hub id"
    )
    parser.add_argument(
        "--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="id of the base model in the catalogue"
    )
    parser.add_argument("--root", type=Path, default=Path(".cache/checkpoints"), help="checkpoint root of the service")
    parser.add_argument("--run", default=time.strftime("run-%Y%m%d-%H%M%S"), help="name of the run in the store")
    parser.add_argument(
        "--owner", default="", help="owner, whose keys alone may sample the checkpoint; empty: every key"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the service")
    key = os.environ.get("ROUNDHOUSE_API_KEY", "roundhouse-demo")
    parser.add_argument("--key", default=key, help="shows in `ps`; default: $ROUNDHOUSE_API_KEY, or the demo's")
    parser.add_argument("--offline", action="store_true", help="train and save without the service")
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="number of steps; 0: as in the recipe")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    return parser.parse_args(arguments)


def prepare(recipe: Recipe, options: argparse.Namespace) -> tuple[PeftModel, list[Example]]:
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    tokenizer.chat_template = recipe.chat_template or tokenizer.chat_template
    config = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    model = get_peft_model(base, config)
    config.base_model_name_or_path = options.base_model  # the model was loaded from a path of this machine
    return model, [encode(lesson, tokenizer) for lesson in recipe.lessons]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(0)
    recipe = RECIPES[options.recipe](random.Random(0))
    options.steps = options.steps or recipe.steps
    client = None if options.offline else OpenAI(base_url=options.url, api_key=options.key)
    if client:
        require_service(client, options.base_model)
    model, examples = prepare(recipe, options)
    print(f"{len(examples)} lessons, {options.steps} steps of {options.batch_size}, rank {options.rank}", flush=True)
    started = time.monotonic()
    facts: dict[str, str | bool] = {"base_model": options.base_model}
    facts |= {"owner": options.owner} if options.owner else {"public": True}
    for step, loss in train(model, examples, options):
        line = f"step {step:4d}  {time.monotonic() - started:5.0f} s  loss {loss:.3f}"
        if step % options.save_every == 0 or step == options.steps:
            name = f"{step:06d}"
            place = options.root / options.run / "sampler_weights" / name
            save_checkpoint(model, place, facts=facts, chat_template=recipe.chat_template)
            model_id = f"tinker://{options.run}/sampler_weights/{name}"
            line += f"  {model_id}"
            if client:  # the next request finds it
                line += f"  {sample(client, model_id, recipe.probe)!r}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
