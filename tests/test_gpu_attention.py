"""Attention by Triton kernels against attention written out token by token, on a device or in the interpreter."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from attention_bench import LAYERS, Bench, Layer, MakeBackend
from engine_harness import DEVICE

from engines.attention.interface import Attention
from engines.attention.sdpa import attend_span
from engines.gpu.attention import PagedLayout, TritonBackend
from engines.gpu.varlen import Flash, VarlenBackend
from engines.kv_cache import KVCache

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


def difference_in_half(
    kv_lens: list[int], new: int, heads: int, kv_heads: int, dim: int, block_size: int, flash: Flash | None = None
) -> float:
    """Relative, of the last `new` tokens of each sequence, to float32."""
    torch.manual_seed(0)
    widths = [-(-length // block_size) for length in kv_lens]
    keys, values = (torch.randn(1 + sum(widths), block_size, kv_heads, dim, device=DEVICE).to(HALF) for _ in range(2))
    blocks = (1 + torch.randperm(sum(widths))).to(DEVICE, torch.int32).split(widths)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    q = torch.randn(new * len(kv_lens), heads, dim, device=DEVICE).to(HALF)
    starts = torch.arange(0, new * len(kv_lens) + 1, new, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    layout = PagedLayout(starts, lengths, tables, (new,) * len(kv_lens), tuple(kv_lens))
    attention, cache = Attention(0, dim**-0.5), KVCache({}, 1, block_size, DEVICE)
    backend = TritonBackend(cache, num_programs=264)
    if flash is not None:
        backend = VarlenBackend(cache, flash, num_programs=264)
    found = backend.compute(q, keys, values, attention, layout).float()
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


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 256])
def test_prefill_of_models_of_real_sizes_by_flash_attention(block_size: int) -> None:
    lengths, sizes = [4096 - 53 * n for n in range(4)], {"heads": 32, "kv_heads": 8, "dim": 128}
    found = difference_in_half(lengths, 512, block_size=block_size, flash=Flash.of_torch(DEVICE), **sizes)
    assert found < 0.006


def flash(
    q,
    k,
    v,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    num_splits,
    seqused_k=None,
    block_table=None,
):
    """As torch documents `varlen_attn`, written out. Of pages it reads all, as FlashAttention 3 does."""
    assert enable_gqa
    assert num_splits == 1
    assert window_size[1] == 0
    starts = cu_seq_q.tolist()
    assert max_q == max(end - start for start, end in pairwise(starts))
    out = []
    for n, (start, end) in enumerate(pairwise(starts)):
        if block_table is None:
            own = slice(*cu_seq_k[n : n + 2].tolist())
            keys, values = k[own], v[own]
        else:
            used, blocks = int(seqused_k[n]), block_table[n].long()
            own = blocks[: -(-used // k.shape[1])]
            assert v[own].isfinite().all()
            keys, values = (x[own].flatten(0, 1)[:used] for x in (k, v))
        assert len(keys) <= max_k
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        attention = Attention(0, scale, window)
        out.append(attend_span(q[start:end], keys, values, len(keys) - (end - start), attention))
    return torch.cat(out)


def by_triton(cache):
    """More than is gathered."""
    return VarlenBackend(cache, Flash(None, (torch.float32,), page=256), num_programs=1)


def test_more_than_is_gathered_is_read_where_it_lies(monkeypatch) -> None:
    monkeypatch.setattr("engines.gpu.varlen.MOST_GATHERED", 0)
    Bench(LAYERS["plain"], by_triton, [300, 3]).run_long_and_short()


def gathering(cache):
    return VarlenBackend(cache, Flash(flash, (torch.float32,), page=256), num_programs=1)


def reading_pages(cache):
    return VarlenBackend(cache, Flash(flash, (torch.float32,), page=16), num_programs=1)


FLASH = ("window", "plain", "one KV head", "window of one", "everything")
BY_FLASH = [pytest.param(LAYERS[name], id=name, marks=pytest.mark.slow if name != FLASH[0] else ()) for name in FLASH]


@pytest.mark.parametrize("make", [gathering, reading_pages])
@pytest.mark.parametrize("layer", BY_FLASH)
def test_prefill_by_flash_attention(layer: Layer, make: MakeBackend) -> None:
    """What it is given, by a stand-in that takes the same arguments; itself it runs on devices only."""
    Bench(layer, make, [50, 33, 16, 1, 20]).run_mixed()
