"""The bits of a row do not depend on the other rows: products, experts, attention."""

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engines.attention.exact import ExactBackend
from engines.lora.context import AdapterContext
from engines.lora.experts import AdaptedExperts
from engines.model.packed_linear import PackedLinear
from engines.model.row_tiles import TILE_ROWS, RowTiles, in_tiles
from engines.planning.scheduler import Chunk
from engines.tensors.batch import build_batch
from engines.tensors.kv_cache import KVCache, LayerShape
from tests.support.engines.attention_bench import BLOCK, NUM_BLOCKS, Layer, text
from tests.support.engines.engine_harness import DEVICE
from tests.support.files.lora_files import random_model

ROWS = 70


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def assert_rows_keep_their_bits(x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The same for a row among all [rows, in], alone, and among any number of its neighbours."""
    whole = compute(x)
    for length in (1, 2, 3, 7, 16, 31, 32, 33, 64):
        for start in range(0, x.shape[0] - length, 13):
            rows = slice(start, start + length)
            assert torch.equal(compute(x[rows].clone()), whole[rows]), f"{length} rows from {start}"


SIZES = [(48, 37), (576, 200), (1000, 31), (64, 1)]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_product_by_tiles_keeps_the_bits_of_each_row(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(ROWS, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    packed = PackedLinear(_linear(weight, bias), tiled=True)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: F.linear(x, weight, bias),
        lambda x: F.linear(x, weight=weight, bias=bias),
        lambda x: x @ weight.T + bias,
        lambda x: torch.matmul(x, weight.T) + bias,
        lambda x: torch.mm(x, weight.T) + bias,
        packed,
    ]
    for product in products:
        with RowTiles():
            assert_rows_keep_their_bits(x, product)
            expected = F.linear(x.double(), weight.double(), bias.double()).float()
            torch.testing.assert_close(product(x), expected, rtol=1e-4, atol=1e-3)


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear


def test_every_product_has_the_same_number_of_rows() -> None:
    seen: list[int] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return x * 2

    for rows in (0, 1, TILE_ROWS, TILE_ROWS + 1):
        out = in_tiles(torch.ones(1, rows, 3), multiply)
        assert out.shape == (1, rows, 3)
        assert bool((out == 2).all())
    assert set(seen) == {TILE_ROWS}


class UngatedExperts(nn.Module):
    """As transformers' `use_experts_implementation` has them, computed expert by expert."""

    has_gate = is_transposed = has_bias = has_post_expert_norm = False
    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(4, 47, 64) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(4, 64, 47) * 0.3)
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        every = torch.stack(
            [self.act_fn(x @ up.T) @ down.T for up, down in zip(self.up_proj, self.down_proj, strict=True)]
        )
        weights = torch.zeros(x.shape[0], 4).scatter_add(1, chosen, shares)
        return torch.einsum("te,eth->th", weights, every)


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "ungated": UngatedExperts,
    **{name: lambda name=name: _experts_of(name) for name in ("qwen3-moe", "gpt-oss", "deepseek-v3")},
}


def _experts_of(name: str) -> nn.Module:
    return next(module for module in random_model(name).modules() if hasattr(module, "has_gate"))


@pytest.mark.parametrize("make", EXPERTS.values(), ids=EXPERTS)
def test_experts_keep_the_bits_of_each_row(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"experts": make()})
    base = model["experts"]
    experts = AdaptedExperts.around(model, "experts", AdapterContext(), row_multiple=TILE_ROWS)
    x = torch.randn(ROWS, 64)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(ROWS)])
    shares = torch.rand(ROWS, 2)
    numbers = torch.arange(ROWS, dtype=torch.float32)[:, None]

    def compute(x_and_number: torch.Tensor) -> torch.Tensor:
        rows = x_and_number[:, -1].long()
        return experts(x_and_number[:, :-1].contiguous(), chosen[rows], shares[rows])

    with RowTiles():
        assert_rows_keep_their_bits(torch.cat([x, numbers], dim=1), compute)
    torch.testing.assert_close(experts(x, chosen, shares), base(x, chosen, shares), rtol=1e-4, atol=1e-5)


LAYERS = {
    "heads of 128": Layer(k_dim=128, v_dim=128),
    "softcap and window": Layer(k_dim=24, v_dim=24, window=21, softcap=3.0),
    "sinks": Layer(heads=6, kv_heads=2, k_dim=64, v_dim=64, with_sinks=True),
    "K and V of different sizes": Layer(kv_heads=4, k_dim=40, v_dim=24),
}


@settings(max_examples=25, deadline=None)
@given(
    layer=st.sampled_from(list(LAYERS.values())),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    company=st.integers(0, 2),
)
def test_attention_keeps_the_bits_of_each_token_in_any_chunks_with_any_company(
    layer: Layer, cuts: list[int], company: int
) -> None:
    length = min(90, sum(cuts))
    with torch.inference_mode():
        ends = [min(end, length) for end in accumulate(cuts)]
        assert torch.equal(_attended(layer, length, ends, company), _attended(layer, length, [length], 0))


def _attended(layer: Layer, length: int, ends: list[int], company: int) -> torch.Tensor:
    """[length, heads, v_dim] of one text that is cut at `ends`, beside some others that are computed whole."""
    torch.manual_seed(2)
    shape = LayerShape(layer.kv_heads, layer.k_dim, layer.v_dim, torch.float32)
    backend = ExactBackend(KVCache({0: shape}, NUM_BLOCKS, BLOCK, DEVICE))
    blocks = list(range(1 + company, NUM_BLOCKS))
    own, *others = (text(layer, size, blocks) for size in (length, 50, 33)[: 1 + company])
    parts = []
    for start, end in pairwise([0, *dict.fromkeys(ends)]):
        texts = [own, *others]
        chunks = [Chunk(own.sequence, start, end - start), *(Chunk(t.sequence, 0, len(t.q)) for t in others)]
        batch = build_batch(chunks, BLOCK, DEVICE)
        by_id = {t.sequence.request_id: t for t in texts}
        rows = [(by_id[c.sequence.request_id], p) for c in batch.chunks for p in range(c.start, c.end)]
        q, k, v = (torch.stack([getattr(one, name)[position] for one, position in rows]) for name in "qkv")
        out = backend.attend(q, k, v, layer.attention(), batch)
        parts += [out[i] for i, (one, _) in enumerate(rows) if one is own]
        others = []
    return torch.stack(parts)
