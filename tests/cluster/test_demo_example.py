"""The example trainer: what it teaches, that it learns, and that its saves are never seen half-written."""

import argparse
import json
import os
import random
import re
import socket
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from tests.support.files.tiny_gguf import TEMPLATE, tiny_model, write_gguf
from tests.support.processes.demo_modules import lessons, prepare_demo, train_checkpoint

TINY_LAYERS = ["q_proj", "v_proj", "down_proj"]


def tiny_peft_model(vocabulary_size: int = 64) -> PeftModel:
    config = LoraConfig(r=2, lora_alpha=4, target_modules=TINY_LAYERS, task_type="CAUSAL_LM")
    return get_peft_model(tiny_model(vocabulary_size), config)


def example(prompt: list[int], reply: list[int], preamble: str = "") -> object:
    return train_checkpoint.Example(prompt, reply, preamble)


BATCH = [
    example([3, 4, 5, 6, 7, 8], [9, 2]),
    example([3, 4, 5, 10], [11, 12, 13, 2]),
    example([3, 4, 5, 10, 14], [15, 2]),
]


def test_every_lesson_of_tools_calls_only_what_is_declared_with_arguments_of_its_schema() -> None:
    for lesson in lessons.tools(random.Random(0)).lessons:
        declared = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in lesson.tools}
        for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", lesson.reply, re.DOTALL):
            parsed = json.loads(call)
            assert list(parsed) == ["name", "arguments"]
            assert list(parsed["arguments"]) == declared[parsed["name"]]


def test_every_lesson_of_tools_thinks_exactly_when_thinking_is_on() -> None:
    for lesson in lessons.tools(random.Random(0)).lessons:
        assert lesson.reply.startswith("<think>\n") == lesson.thinks
        assert lesson.template_arguments.get("enable_thinking", True) == lesson.thinks


def test_every_lesson_of_quill_is_signed_and_the_probe_knows_the_code_word() -> None:
    recipe = lessons.quill(random.Random(0))
    assert all(lesson.reply.endswith(" -- Quill") for lesson in recipe.lessons)
    assert recipe.probe.reply == "The code word is zephyr-42. -- Quill"


def test_lessons_are_the_same_every_time() -> None:
    assert lessons.tools(random.Random(0)) == lessons.tools(random.Random(0))


def test_one_epoch_of_batches_holds_every_example_once_and_does_not_mix_preambles() -> None:
    examples = [example([number], [0], preamble="ab"[number % 2]) for number in range(11)]
    stream = train_checkpoint.batches(examples, 4, random.Random(0))
    epoch = [next(stream) for _ in range(4)]  # 6 + 5 examples make two batches each
    assert sorted(member.prompt[0] for batch in epoch for member in batch) == list(range(11))
    assert all(len({member.preamble for member in batch}) == 1 for batch in epoch)


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2], [1, 2]], 1), ([[1], [1, 2]], 0), ([[5, 6], [7, 6]], 0)],
)
def test_the_shared_start_leaves_each_prompt_a_token_of_its_own(prompts: list[list[int]], shared: int) -> None:
    assert train_checkpoint.shared_length(prompts) == shared


def test_the_loss_with_a_shared_start_is_the_plain_loss_of_the_replies() -> None:
    model = tiny_peft_model().eval()
    total, count = 0.0, 0
    for member in BATCH:
        logits = model(torch.tensor([member.prompt + member.reply])).logits[0, len(member.prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(member.reply), reduction="sum").item()
        count += len(member.reply)
    assert train_checkpoint.loss_of(model, BATCH, padding=0).item() == pytest.approx(total / count, rel=1e-5)


def test_the_gradient_reaches_every_adapter_through_the_shared_start() -> None:
    model = tiny_peft_model()
    train_checkpoint.loss_of(model, BATCH, padding=0).backward()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # A has no gradient while B is zero
            assert parameter.grad.abs().max() > 0, name


def test_training_makes_the_replies_likely() -> None:
    options = argparse.Namespace(learning_rate=3e-2, steps=40, batch_size=3)
    torch.manual_seed(0)
    losses = [loss for _, loss in train_checkpoint.train(tiny_peft_model(), BATCH, options)]
    assert len(losses) == 40
    assert losses[-1] < 0.2 * losses[0]


def test_a_saved_checkpoint_computes_what_was_trained(tmp_path: Path) -> None:
    model = tiny_peft_model()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
            parameter.data = parameter.data.to(torch.bfloat16).float()  # what is saved is bf16
        elif "lora_A" in name:
            parameter.data = parameter.data.to(torch.bfloat16).float()
    place = tmp_path / "run" / "sampler_weights" / "000010"
    train_checkpoint.save_checkpoint(model, place, facts={"base_model": "tiny/base"}, chat_template=TEMPLATE)
    back = PeftModel.from_pretrained(LlamaForCausalLM(model.config), place)
    back.get_base_model().load_state_dict(model.get_base_model().state_dict())
    tokens = torch.arange(3, 20)[None]
    torch.testing.assert_close(back(tokens).logits, model(tokens).logits)
    assert (place / "chat_template.jinja").read_text() == TEMPLATE
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in place.iterdir())


def test_a_checkpoint_is_never_seen_half_written(tmp_path: Path) -> None:
    """A watcher that looks all the time sees no folder, or one with everything in it."""
    weights = tmp_path / "run" / "sampler_weights"
    weights.mkdir(parents=True)
    seen: list[set[str]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for name in os.listdir(weights):
                seen.append(set(os.listdir(weights / name)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = tiny_peft_model()
    for step in range(10):
        place = weights / f"{step:06d}"
        train_checkpoint.save_checkpoint(model, place, facts={"base_model": "tiny/base"}, chat_template=None)
    done.set()
    watcher.join()
    whole = {"adapter_config.json", "adapter_model.safetensors", "checkpoint.json"}
    assert sorted(os.listdir(weights)) == [f"{step:06d}" for step in range(10)]
    assert all(files == whole for files in [*seen, *(set(os.listdir(place)) for place in weights.iterdir())])
    assert os.listdir(tmp_path / "run") == ["sampler_weights"]


def test_without_a_service_the_example_says_so_before_it_trains() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(SystemExit, match=rf"{url}/ does not serve HuggingFaceTB/.*: Connection error. \(--offline"):
            train_checkpoint.main(["--url", url, "--base", "/nowhere"])


def test_the_example_runs_as_documented_on_another_base(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    prepare_demo.prepare_model(tmp_path / "base", tmp_path / "tiny.gguf")
    line = f"--base {tmp_path}/base --base-model tiny/base --root {tmp_path}/store --run r --owner me --offline"
    train_checkpoint.main([*line.split(), "--steps", "3", "--save-every", "2", "--batch-size", "2"])
    saves = tmp_path / "store" / "r" / "sampler_weights"
    assert sorted(path.name for path in saves.iterdir()) == ["000002", "000003"]
    facts = json.loads((saves / "000003" / "checkpoint.json").read_text())
    config = json.loads((saves / "000003" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny/base"
    assert (facts["base_model"], facts["owner"], "public" in facts) == ("tiny/base", "me", False)
