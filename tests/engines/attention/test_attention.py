"""The attention backends against attention written out token by token."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engines.attention.exact import ExactBackend
from engines.attention.interface import Paged, paged_attention
from engines.attention.sdpa import SdpaBackend
from engines.interface.errors import ModelRefused
from engines.planning.scheduler import Chunk
from engines.tensors.batch import build_batch
from engines.tensors.kv_cache import KVCache, LayerShape
from tests.support.engines.attention_bench import BLOCK, LAYERS, Bench, Layer, MakeBackend
from tests.support.engines.engine_harness import DEVICE

BACKENDS: list[MakeBackend] = [SdpaBackend, ExactBackend]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_chunks_and_single_tokens_in_one_batch_attend_to_what_they_should(layer: Layer, make: MakeBackend) -> None:
    Bench(layer, make, [50, 33, 16, 1, 20]).run_mixed()


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_long_text_and_a_short_one_in_one_batch(layer: Layer, make: MakeBackend) -> None:
    Bench(layer, make, [300, 3]).run_long_and_short()


@settings(max_examples=40, deadline=None)
@given(
    layer=st.sampled_from(list(LAYERS.values())),
    make=st.sampled_from(BACKENDS),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_way_of_cutting_any_texts_gives_the_same(
    layer: Layer, make: MakeBackend, lengths: list[int], seed: int
) -> None:
    with torch.inference_mode():
        Bench(layer, make, lengths).run_cut_at_random(seed)


def call(module: nn.Module, *, mask: torch.Tensor | None = None, **arguments: object) -> torch.Tensor:
    bench = Bench(LAYERS["plain"], SdpaBackend, [3])
    one = bench.texts[0]
    batch = build_batch([Chunk(one.sequence, 0, 3)], BLOCK, DEVICE)
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
    bench = Bench(LAYERS["plain"], SdpaBackend, [20])
    cache = KVCache({0: LayerShape(2, 8, 8, torch.float32)}, 4, BLOCK, DEVICE)
    cache.k[0][:] = cache.v[0][:] = 7.0
    one = bench.texts[0]
    one.sequence.blocks = [3, 1]
    batch = build_batch([Chunk(one.sequence, 0, 20)], BLOCK, DEVICE)
    cache.write(0, one.k, one.v, batch.kv_slots, batch.fresh_blocks)
    assert torch.equal(cache.k[0][3], one.k[:16])
    assert torch.equal(cache.v[0][1, :4], one.v[16:])
    assert not cache.k[0][1, 4:].any(), "what the last owner left must not be read"
    assert bool((cache.k[0][[0, 2]] == 7.0).all())
