"""Attention by Triton kernels against attention written out token by token, on a device or in the interpreter."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from engines.attention.interface import Attention
from engines.attention.sdpa import attend_span
from engines.gpu.attention import PagedLayout, TritonBackend
from engines.gpu.flashinfer import FlashInferBackend, wrappers_of
from engines.gpu.varlen import Flash, VarlenBackend
from engines.tensors.kv_cache import KVCache, LayerShape
from tests.support.engines.attention_bench import LAYERS, Bench, Layer, MakeBackend
from tests.support.engines.engine_harness import DEVICE

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


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_any_way_of_cutting_any_texts_gives_the_same(seed: int) -> None:
    Bench(LAYERS["everything"], split, [60, 1, 17, 150]).run_cut_at_random(seed)


HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


def difference_in_half(
    kv_lens: list[int],
    new: int,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    backend: TritonBackend | None = None,
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
    backend = backend or TritonBackend(cache, num_programs=264)
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
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_of_models_of_real_sizes_by_flashinfer(block_size: int) -> None:
    pytest.importorskip("flashinfer")
    make, cache = wrappers_of(DEVICE), KVCache({}, 1, block_size, DEVICE)
    found = difference_in_half(
        [4096 - 53 * n for n in range(4)],
        512,
        heads=32,
        kv_heads=8,
        dim=128,
        block_size=block_size,
        backend=FlashInferBackend(cache, make, num_programs=264),
    )
    assert found < 0.006


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 256])
def test_prefill_of_models_of_real_sizes_by_flash_attention(block_size: int) -> None:
    lengths, sizes = [4096 - 53 * n for n in range(4)], {"heads": 32, "kv_heads": 8, "dim": 128}
    backend = VarlenBackend(KVCache({}, 1, block_size, DEVICE), Flash.of_torch(DEVICE), num_programs=264)
    found = difference_in_half(lengths, 512, block_size=block_size, backend=backend, **sizes)
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
    return VarlenBackend(cache, Flash(None, (torch.float32,), page=256), num_programs=1, most_gathered=0)


def test_more_than_is_gathered_is_read_where_it_lies() -> None:
    Bench(LAYERS["plain"], by_triton, [300, 3]).run_long_and_short()


def gathering(cache):
    return VarlenBackend(cache, Flash(flash, (torch.float32,), page=256), num_programs=1)


def reading_pages(cache):
    return VarlenBackend(cache, Flash(flash, (torch.float32,), page=16), num_programs=1)


class Wrapper:
    """As flashinfer documents its `BatchPrefillWithPagedKVCacheWrapper`, written out. It looks at whole pages."""

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
    ):
        assert causal
        assert q_data_type == kv_data_type
        assert all(t.dtype == torch.int32 for t in (qo_indptr, kv_indptr, kv_indices, last_page_len))
        assert all(1 <= n <= page_size for n in last_page_len.tolist())
        assert kv_indices.shape == (int(kv_indptr[-1]),)
        self.sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self.attention = Attention(0, sm_scale, window_left + 1 if window_left >= 0 else None, logits_soft_cap)
        self.queries = list(pairwise(qo_indptr.tolist()))
        self.pages = [kv_indices[start:end].long() for start, end in pairwise(kv_indptr.tolist())]
        self.last = last_page_len.tolist()

    def run(self, q, paged_kv_cache):
        keys, values = paged_kv_cache
        assert (*q.shape[1:2], *values.shape[2:], values.shape[1]) == self.sizes
        out = []
        for (start, end), pages, last in zip(self.queries, self.pages, self.last, strict=True):
            assert values[pages].isfinite().all()
            used = (len(pages) - 1) * values.shape[1] + last
            own = (x[pages].flatten(0, 1)[:used] for x in (keys, values))
            out.append(attend_span(q[start:end], *own, used - (end - start), self.attention))
        return torch.cat(out)


def by_flashinfer(cache):
    return FlashInferBackend(cache, Wrapper, num_programs=1, dtypes=(torch.float32,), sizes=(8,))


def test_layers_that_ask_for_different_things_have_plans_of_their_own() -> None:
    cache = KVCache({0: LayerShape(1, 8, 8, torch.float32)}, 4, 16, DEVICE)
    made: list[Wrapper] = []
    backend = FlashInferBackend(
        cache, lambda: made.append(Wrapper()) or made[-1], num_programs=1, dtypes=(torch.float32,), sizes=(8,)
    )
    q, starts = torch.randn(5, 2, 8, device=DEVICE), torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    for table in ([1, 2], [3, 1]):
        tables = torch.tensor([table], dtype=torch.int32, device=DEVICE)
        for layer in (cache.k[0], cache.v[0]):
            layer.normal_()
        layout = PagedLayout(starts, torch.tensor([20], device=DEVICE), tables, (5,), (20,))
        for window in (None, 3, None):
            attention = Attention(0, 0.3, window)
            keys, values = (x[table].flatten(0, 1)[:20] for x in (cache.k[0], cache.v[0]))
            found = backend.compute(q, cache.k[0], cache.v[0], attention, layout)
            torch.testing.assert_close(found, attend_span(q, keys, values, 15, attention))
    assert len(made) == 2


FLASH = ("window", "plain", "one KV head", "window of one", "softcap", "everything")
BY_FLASH = [pytest.param(LAYERS[name], id=name, marks=pytest.mark.slow if name != FLASH[0] else ()) for name in FLASH]


@pytest.mark.parametrize("make", [gathering, reading_pages, by_flashinfer])
@pytest.mark.parametrize("layer", BY_FLASH)
def test_prefill_by_a_library(layer: Layer, make: MakeBackend) -> None:
    """What it is given, by a stand-in that takes the same arguments; itself it runs on devices only."""
    Bench(layer, make, [50, 33, 16, 1, 20]).run_mixed()
