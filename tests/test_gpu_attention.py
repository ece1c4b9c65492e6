"""Attention by Triton kernels against attention written out token by token, on a device or in the interpreter."""

from collections.abc import Iterator

import pytest
import torch
from attention_bench import LAYERS, Bench, Layer, MakeBackend
from engine_harness import DEVICE

from engines.attention.interface import Attention
from engines.attention.sdpa import attend_span
from engines.gpu.attention import PagedLayout, TritonBackend, attend

QUICK = ("plain", "everything")
BY_NAME = [
    pytest.param(layer, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, layer in LAYERS.items()
]


def whole(cache):
    return TritonBackend(cache, num_programs=1)


def split(cache):
    """The keys of a long text are split over programs."""
    return TritonBackend(cache, num_programs=64)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("layer", BY_NAME)
def test_chunks_and_single_tokens_in_one_batch_attend_to_what_they_should(layer: Layer) -> None:
    Bench(layer, whole, [50, 33, 16, 1, 20]).run_mixed()


@pytest.mark.parametrize("make", [whole, split])
@pytest.mark.parametrize("layer", BY_NAME)
def test_a_long_text_and_a_short_one_in_one_batch(layer: Layer, make: MakeBackend) -> None:
    Bench(layer, make, [300, 3]).run_long_and_short()


@pytest.mark.parametrize("seed", range(4))
def test_any_way_of_cutting_any_texts_gives_the_same(seed: int) -> None:
    Bench(LAYERS["everything"], split, [60, 1, 17, 150]).run_cut_at_random(seed)


HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


def difference_in_half(kv_lens: list[int], new: int, heads: int, kv_heads: int, dim: int, block_size: int) -> float:
    """Relative, of the last `new` tokens of each sequence, to float32."""
    torch.manual_seed(0)
    widths = [-(-length // block_size) for length in kv_lens]
    keys, values = (torch.randn(1 + sum(widths), block_size, kv_heads, dim, device=DEVICE).to(HALF) for _ in range(2))
    blocks = (1 + torch.randperm(sum(widths))).to(DEVICE, torch.int32).split(widths)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    q = torch.randn(new * len(kv_lens), heads, dim, device=DEVICE).to(HALF)
    starts = torch.arange(0, new * len(kv_lens) + 1, new, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    layout = PagedLayout(starts, lengths, tables, (new,) * len(kv_lens))
    attention = Attention(0, dim**-0.5)
    found = attend(q, keys, values, attention, layout, num_programs=264).float()
    expected = torch.cat(
        [
            attend_span(
                q[n * new : (n + 1) * new].float(),
                *(x[own].flatten(0, 1)[:length].float() for x in (keys, values)),
                length - new,
                attention,
            )
            for n, (own, length) in enumerate(zip(blocks, kv_lens, strict=True))
        ]
    )
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("new", [1, 40])
def test_half_precision_is_as_exact_as_it_can_be(new: int) -> None:
    assert difference_in_half([150, 41], new, heads=4, kv_heads=2, dim=16, block_size=16) < 0.006


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("new", "count"), [(1, 1), (1, 64), (512, 4)])
def test_models_of_real_sizes(new: int, count: int, block_size: int) -> None:
    lengths = [4096 - 53 * n for n in range(count)]
    assert difference_in_half(lengths, new, heads=32, kv_heads=8, dim=128, block_size=block_size) < 0.006
