"""The engine on a CUDA device: tokens per second beside what the card's memory and arithmetic allow, and beside
transformers' continuous batching. Needs torch, transformers and peft only; no Ray, no network.

    python tests/bench/gpu.py [--shapes 0.6B,4B] [--minutes 6] [--device cuda]

Models of Qwen3's shapes with random weights are made on the spot. Each line is printed as soon as it is measured, and
the table again at the end; what the time does not suffice for is left out, and the table says so. `--shapes tiny
--device cpu` runs everything once on a CPU, to try the script itself.
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from engines.interface.config import EngineConfig
from engines.interface.errors import EngineError
from engines.interface.protocol import Adapter, GenerateRequest, Output, SamplingParams
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from engines.torch_engine import TorchEngine

PROMPT, OUTPUT = 512, 128
ADAPTERS, RANK = 8, 16

_QWEN3: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "tiny": {
        **_QWEN3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True, slots=True)
class Card:
    """What the device does at best, measured: bytes per second read (or written) and operations per second."""

    name: str
    bytes_per_s: float
    flops: float

    @classmethod
    def measured(cls, device: torch.device, *, small: bool) -> "Card":
        nbytes, size = (1 << 24, 512) if small else (4 << 30, 8192)
        source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        copy_s = _seconds(lambda: target.copy_(source), device)
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        product_s = _seconds(lambda: a @ b, device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return cls(name, 2 * nbytes / copy_s, 2 * size**3 / product_s)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(8):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Model:
    folder: Path
    config: Any
    num_parameters: int  # that a token is multiplied with
    adapters: tuple[Adapter, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def make_model(shape: str, root: Path, device: torch.device) -> Model:
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=4096, dtype="bfloat16")
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())  # tied: the embedding is the head, so it counts once
    folder = root / shape
    model.save_pretrained(folder)
    linears = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linears.pop("lm_head", None)
    adapters = tuple(_make_adapter(root / f"{shape}-{n}", linears, n) for n in range(ADAPTERS))
    return Model(folder, config, count, adapters)


def _make_adapter(folder: Path, linears: dict[str, tuple[int, ...]], seed: int) -> Adapter:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in linears.items():
        for letter, size in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = torch.randn(size, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = values.to(torch.bfloat16)
    save_file(tensors, folder / WEIGHTS_FILE)
    names = sorted({name.rpartition(".")[2] for name in linears})
    (folder / CONFIG_FILE).write_text(
        f'{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}, "target_modules": {names}}}'.replace("'", '"')
    )
    files = (folder / CONFIG_FILE, folder / WEIGHTS_FILE)
    return Adapter(adapter_digest(*(file.read_bytes() for file in files)), str(folder))


@dataclass(slots=True)
class _Sink:
    """How many requests have begun and ended, when the last of them began, and the tokens since."""

    expected: int
    begun: set[str] = field(default_factory=set)
    all_begun_at: float = 0.0
    tokens: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ended: int = 0

    def deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output.event, EngineError):
                raise SystemExit(f"a request failed: {output.event}")
            if len(self.begun) == self.expected:
                self.tokens += len(output.event.token_ids)
            self.begun.add(output.request_id)
            self.ended += output.event.finish_reason is not None
        if len(self.begun) == self.expected and not self.all_begun_at:
            self.all_begun_at = time.perf_counter()
        if self.ended == self.expected:
            self.done.set()


@dataclass(frozen=True, slots=True)
class Speed:
    """In tokens per second: of the prompts until all requests have their first token, of decoding from then on, of the
    output over the whole run.
    """

    prefill: float
    decode: float
    whole: float


class Engine:
    def __init__(self, model: Model, device: torch.device, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self._engine = TorchEngine(
            EngineConfig(
                str(model.folder),
                **{
                    "device": device.type,
                    "max_running": 64,
                    "max_step_tokens": 8192,
                    "prefix_cache": False,
                    "max_adapters": ADAPTERS,
                    "max_adapter_rank": RANK,
                    **settings,
                },
            )
        )
        self._runner.run(self._engine.start())
        self._vocab = model.config.vocab_size
        self._number = 0

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(self, count: int, prompt: int, output: int, adapters: Sequence[Adapter] = ()) -> "Speed":
        return self._runner.run(self._run(count, prompt, output, adapters))

    async def _run(self, count: int, prompt: int, output: int, adapters: Sequence[Adapter]) -> "Speed":
        sink = _Sink(count)
        started = time.perf_counter()
        for index in range(count):
            self._number += 1
            rng = Random(self._number)
            ids = tuple(rng.randrange(self._vocab) for _ in range(prompt))
            sampling = SamplingParams(max_tokens=output, seed=0, temperature=0.0)
            bound = adapters[index % len(adapters)] if adapters else None
            self._engine.submit(GenerateRequest(str(self._number), ids, sampling, bound), sink)
        await sink.done.wait()
        ended = time.perf_counter()
        decode = sink.tokens / max(ended - sink.all_begun_at, 1e-9)
        return Speed(count * prompt / (sink.all_begun_at - started), decode, count * output / (ended - started))


class Table:
    def __init__(self, ends_at: float) -> None:
        self.lines: list[str] = []
        self._ends_at = ends_at

    def add(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def has_time(self, what: str) -> bool:
        if time.monotonic() < self._ends_at:
            return True
        self.add(f"| {what} | not measured: out of time | | |")
        return False


def variants_for(device: torch.device) -> dict[str, dict[str, Any]]:
    """Settings by name; the first is the main one."""
    if device.type == "cpu":
        return {"gather and SDPA": {"attention": "sdpa"}}
    variants: dict[str, dict[str, Any]] = {
        "Triton and CUDA graphs": {},
        "waiting for each step's tokens": {"overlap": False},
        "Triton without graphs": {"cuda_graphs": False},
        "FlashAttention in prefill": {"attention": "varlen"},
        "gather and SDPA": {"attention": "sdpa"},
    }
    if find_spec("flashinfer") is not None:
        variants["flashinfer in prefill"] = {"attention": "flashinfer"}
    return variants


def measure(shape: str, model: Model, card: Card, table: Table, device: torch.device, sizes: tuple[int, int]) -> None:
    prompt, output = sizes
    variants = variants_for(device)
    rates: dict[int, Speed] = {}
    for name, settings in variants.items():
        if not table.has_time(f"{shape}, {name}"):
            continue
        is_main = name == next(iter(variants))
        try:
            engine = Engine(model, device, **settings)
        except Exception as exc:  # a library that is not there, or of another version
            if is_main:
                raise
            table.add(f"| {shape}, {name} | not possible here: {type(exc).__name__}: {exc} | | |")
            continue
        engine.run(2, prompt, 8)  # warm
        for batch in (1, 8, 32, 64) if is_main else (1, 32):
            speed = engine.run(batch, prompt, output)
            rates.setdefault(batch, speed)  # of the first variant
            step_bytes = 2 * model.num_parameters + batch * (prompt + output / 2) * model.kv_bytes_per_token
            limit = batch * card.bytes_per_s / step_bytes
            share = speed.decode / limit
            table.add(f"| {shape}, {name}, decode, {batch} | {speed.decode:.0f} | {limit:.0f} (memory) | {share:.0%} |")
        long = min(1024, 2 * prompt)
        rate, limit = engine.run(8, long, 1).prefill, card.flops / (2 * model.num_parameters)
        table.add(
            f"| {shape}, {name}, prefill, 8 x {long} | {rate:.0f} | {limit:.0f} (arithmetic) | {rate / limit:.0%} |"
        )
        if is_main:
            engine.run(ADAPTERS, prompt, 4, model.adapters)  # loads them
            for batch in (8, 32):
                rate = engine.run(batch, prompt, output, model.adapters).decode
                of_base = rate / rates[batch].decode
                table.add(
                    f"| {shape}, {ADAPTERS} adapters, decode, {batch} | {rate:.0f} | of the base | {of_base:.0%} |"
                )
        engine.close()
    if 64 in rates and table.has_time(f"{shape}, transformers' continuous batching"):
        rate, ours = continuous_batching(model, device, 64, prompt, output), rates[64].whole
        table.add(
            f"| {shape}, the whole run, 64 | {ours:.0f} | transformers' batching: {rate:.0f} | {ours / rate:.1f} x |"
        )


def continuous_batching(model: Model, device: torch.device, count: int, prompt: int, output: int) -> float:
    """Tokens per second over the whole run, prefill included: its interface gives no other."""
    rng = Random(1)
    inputs = [[rng.randrange(model.config.vocab_size) for _ in range(prompt)] for _ in range(count)]
    served = Qwen3ForCausalLM.from_pretrained(model.folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    settings = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    served.generate_batch([inputs[0][:16]], generation_config=settings)  # warm
    started = time.perf_counter()
    outputs = served.generate_batch(inputs, generation_config=settings)
    seconds = time.perf_counter() - started
    return sum(len(one.generated_tokens) for one in outputs.values()) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.6B,4B")
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    table = Table(time.monotonic() + 60 * options.minutes)
    is_small = device.type == "cpu"
    card = Card.measured(device, small=is_small)
    table.add(f"{card.name}: {card.bytes_per_s / 1e12:.2f} TB/s, {card.flops / 1e12:.0f} TFLOP/s in bfloat16, measured")
    table.add("")
    table.add("| what | tokens/s | limit | share |")
    table.add("|---|--:|--:|--:|")
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="roundhouse-gpu-") as root:
            model = make_model(shape, Path(root), device)
            with torch.inference_mode():
                measure(shape, model, card, table, device, (32, 8) if is_small else (PROMPT, OUTPUT))
    print("\n".join(["", *table.lines]))


if __name__ == "__main__":
    main()
