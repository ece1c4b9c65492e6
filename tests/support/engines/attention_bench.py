"""Attention over texts in a paged cache, and what should come out of it, written out token by token."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from engines.attention.interface import Attention, AttentionBackend
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence
from engines.tensors.batch import build_batch
from engines.tensors.kv_cache import KVCache, LayerShape
from tests.support.engines.engine_harness import DEVICE, request

MakeBackend = Callable[[KVCache], AttentionBackend]
BLOCK = 16
NUM_BLOCKS = 64


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
        sinks = torch.linspace(-1, 2, self.heads, device=DEVICE) if self.with_sinks else None
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

    sequence: TokenSequence
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def outcome(self, position: int, layer: Layer) -> torch.Tensor:
        """[heads, v_dim], in float64, written out."""
        attention = layer.attention()
        out = torch.zeros(layer.heads, layer.v_dim, dtype=torch.float64, device=DEVICE)
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
    made = TokenSequence.of(request([0] * length), NO_SINK)
    made.blocks = [blocks.pop() for _ in range(-(-length // BLOCK))]
    sizes = ((layer.heads, layer.k_dim), (layer.kv_heads, layer.k_dim), (layer.kv_heads, layer.v_dim))
    return Text(made, *(torch.randn(length, *size, device=DEVICE) for size in sizes))


class Bench:
    """A cache full of what others left, and texts in shuffled blocks of it."""

    def __init__(self, layer: Layer, make: Callable[[KVCache], AttentionBackend], lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.layer = layer
        shape = LayerShape(layer.kv_heads, layer.k_dim, layer.v_dim, torch.float32)
        cache = KVCache({0: shape}, NUM_BLOCKS, BLOCK, DEVICE)
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
        batch = build_batch(chunks, BLOCK, DEVICE)
        rows = [(texts[c.sequence.request_id], p) for c in batch.chunks for p in range(c.start, c.end)]
        q, k, v = (torch.stack([getattr(one, name)[position] for one, position in rows]) for name in "qkv")
        found = self.backend.attend(q, k, v, self.layer.attention(), batch)
        expected = torch.stack([one.outcome(position, self.layer) for one, position in rows])
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end

    def run_mixed(self) -> None:
        """Chunks and single tokens side by side, for texts of 50, 33, 16, 1 and 20 tokens."""
        for lengths in ([17, 33, 5, 1, 0], [1, 1, 11, 1, 7], [20, 1, 1, 1, 1], *[[1, 1, 1, 1, 1]] * 14):
            self.step(lengths)
        assert all(not one.sequence.num_pending for one in self.texts)

    def run_long_and_short(self) -> None:
        """For texts of 300 and 3 tokens."""
        for lengths in ([297, 1], [1, 1], [1, 0], [1, 1]):
            self.step(lengths)
        assert all(not one.sequence.num_pending for one in self.texts)

    def run_cut_at_random(self, seed: int) -> None:
        rng = Random(seed)
        while any(one.sequence.num_pending for one in self.texts):
            self.step([rng.choice([0, 1, 1, 5, 16, 30]) for _ in self.texts])
