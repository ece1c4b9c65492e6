"""The attention backends against attention written out token by token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

import pytest
import torch
from engine_harness import request
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engines.attention.exact import ExactBackend
from engines.attention.interface import Attention, AttentionBackend, Paged, paged_attention
from engines.attention.sdpa import SdpaBackend
from engines.batch import build_batch
from engines.errors import ModelRefused
from engines.kv_cache import KVCache, LayerShape
from engines.model_runner import NO_SINK
from engines.scheduler import Chunk
from engines.sequence import Sequence

BACKENDS: list[Callable[[KVCache], AttentionBackend]] = [SdpaBackend, ExactBackend]
CPU = torch.device("cpu")
BLOCK = 16
NUM_BLOCKS = 64


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass(frozen=True)
class Layer:
    """What a layer looks like, and what it asks for."""

    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False

    def attention(self) -> Attention:
        sinks = torch.linspace(-1, 2, self.heads) if self.with_sinks else None
        return Attention(0, self.k_dim**-0.5, self.window, self.softcap, sinks)


LAYERS = {
    "plain": Layer(),
    "one KV head": Layer(kv_heads=1),
    "no groups": Layer(kv_heads=4),
    "window": Layer(window=5),
    "window of one": Layer(window=1),
    "softcap": Layer(softcap=1.5),
    "sinks": Layer(with_sinks=True),
    "K and V of different sizes": Layer(k_dim=12, v_dim=4),
    "everything": Layer(heads=6, kv_heads=3, k_dim=12, v_dim=4, window=9, softcap=2.0, with_sinks=True),
}


@dataclass
class Text:
    """Q, K and V of all tokens of a sequence."""

    sequence: Sequence
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def outcome(self, position: int, layer: Layer) -> torch.Tensor:
        """[heads, v_dim], in float64, written out."""
        attention = layer.attention()
        out = torch.zeros(layer.heads, layer.v_dim, dtype=torch.float64)
        first = 0 if layer.window is None else max(0, position - layer.window + 1)
        for head in range(layer.heads):
            own = head // (layer.heads // layer.kv_heads)
            scores = self.k[first : position + 1, own].double() @ self.q[position, head].double() * attention.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if attention.sinks is not None:
                scores = torch.cat([scores, attention.sinks[head : head + 1].double()])
            weights = torch.softmax(scores, dim=0)[: position + 1 - first]
            out[head] = weights @ self.v[first : position + 1, own].double()
        return out


def text(layer: Layer, length: int, blocks: list[int]) -> Text:
    made = Sequence.of(request([0] * length), NO_SINK)
    made.blocks = [blocks.pop() for _ in range(-(-length // BLOCK))]
    sizes = ((layer.heads, layer.k_dim), (layer.kv_heads, layer.k_dim), (layer.kv_heads, layer.v_dim))
    return Text(made, *(torch.randn(length, *size) for size in sizes))


class Bench:
    """A cache full of what others left, and texts in shuffled blocks of it."""

    def __init__(self, layer: Layer, make: Callable[[KVCache], AttentionBackend], lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.layer = layer
        shape = LayerShape(layer.kv_heads, layer.k_dim, layer.v_dim, torch.float32)
        cache = KVCache({0: shape}, NUM_BLOCKS, BLOCK, CPU)
        for values in (cache.k[0], cache.v[0]):
            values[1:] = float("nan")
        self.backend = make(cache)
        blocks = list(range(1, NUM_BLOCKS))
        Random(1).shuffle(blocks)
        self.texts = [text(layer, length, blocks) for length in lengths]

    def step(self, lengths: list[int]) -> None:
        """The next tokens of each text, all in one batch, compared with what should come out."""
        chunks, texts = [], {}
        for one, length in zip(self.texts, lengths, strict=True):
            length = min(length, one.sequence.num_pending)
            if length:
                chunks.append(Chunk(one.sequence, one.sequence.num_computed, length))
                texts[one.sequence.request_id] = one
        if not chunks:
            return
        batch = build_batch(chunks, BLOCK, CPU)
        rows = [(texts[c.sequence.request_id], p) for c in batch.chunks for p in range(c.start, c.end)]
        q, k, v = (torch.stack([getattr(one, name)[position] for one, position in rows]) for name in "qkv")
        found = self.backend.attend(q, k, v, self.layer.attention(), batch)
        expected = torch.stack([one.outcome(position, self.layer) for one, position in rows])
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_chunks_and_single_tokens_in_one_batch_attend_to_what_they_should(
    layer: Layer, make: Callable[[KVCache], AttentionBackend]
) -> None:
    bench = Bench(layer, make, [50, 33, 16, 1, 20])
    for lengths in ([17, 33, 5, 1, 0], [1, 1, 11, 1, 7], [20, 1, 1, 1, 1], *[[1, 1, 1, 1, 1]] * 14):
        bench.step(lengths)
    assert all(not one.sequence.num_pending for one in bench.texts)


@settings(max_examples=40, deadline=None)
@given(
    layer=st.sampled_from(list(LAYERS.values())),
    make=st.sampled_from(BACKENDS),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_way_of_cutting_any_texts_gives_the_same(
    layer: Layer, make: Callable[[KVCache], AttentionBackend], lengths: list[int], seed: int
) -> None:
    with torch.inference_mode():
        bench, rng = Bench(layer, make, lengths), Random(seed)
        for _ in count():
            bench.step([rng.choice([0, 1, 1, 5, 16, 30]) for _ in lengths])
            if all(not one.sequence.num_pending for one in bench.texts):
                break


def call(module: nn.Module, *, mask: torch.Tensor | None = None, **arguments: object) -> torch.Tensor:
    bench = Bench(LAYERS["plain"], SdpaBackend, [3])
    one = bench.texts[0]
    batch = build_batch([Chunk(one.sequence, 0, 3)], BLOCK, CPU)
    q, k, v = (x.transpose(0, 1)[None] for x in (one.q, one.k, one.v))
    out, _ = paged_attention(module, q, k, v, mask, paged=Paged(bench.backend, batch), **arguments)  # type: ignore[arg-type]
    expected = torch.stack([one.outcome(position, bench.layer) for position in range(3)])
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-4, atol=1e-5)
    return out


class SomeAttention(nn.Module):
    layer_idx = 0
    is_causal = True


def test_arguments_without_a_meaning_here_are_accepted() -> None:
    call(SomeAttention(), scaling=8**-0.5, dropout=0.0, position_ids=torch.arange(3), use_cache=False, indices=None)


@pytest.mark.parametrize("name", ["indices", "block_mask", "a_new_idea"])
def test_an_argument_that_is_not_known_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelRefused, match=f"SomeAttention passes the attention argument '{name}'"):
        call(SomeAttention(), **{name: torch.arange(3)})


def test_a_mask_is_refused() -> None:
    with pytest.raises(ModelRefused, match="SomeAttention passes an attention mask"):
        call(SomeAttention(), mask=torch.ones(1, 1, 3, 3))


def test_attention_in_both_directions_is_refused() -> None:
    module = SomeAttention()
    module.is_causal = False
    with pytest.raises(ModelRefused, match="attends in both directions"):
        call(module)
    with pytest.raises(ModelRefused, match="attends in both directions"):
        call(SomeAttention(), is_causal=False)


def test_the_cache_is_written_where_the_batch_says_and_left_alone_elsewhere() -> None:
    bench = Bench(replace(LAYERS["plain"]), SdpaBackend, [20])
    cache = KVCache({0: LayerShape(2, 8, 8, torch.float32)}, 4, BLOCK, CPU)
    cache.k[0][:] = cache.v[0][:] = 7.0
    one = bench.texts[0]
    one.sequence.blocks = [3, 1]
    batch = build_batch([Chunk(one.sequence, 0, 20)], BLOCK, CPU)
    cache.write(0, one.k, one.v, batch.kv_slots, batch.fresh_blocks)
    assert torch.equal(cache.k[0][3], one.k[:16])
    assert torch.equal(cache.v[0][1, :4], one.v[16:])
    assert not cache.k[0][1, 4:].any(), "what the last owner left must not be read"
    assert bool((cache.k[0][[0, 2]] == 7.0).all())
