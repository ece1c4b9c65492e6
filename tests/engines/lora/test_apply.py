"""Adapters on the modules of a model: which can be adapted, what they add to which rows, and what stays behind."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engines.interface.errors import AdapterRefused
from engines.lora.adaptable import adaptable_targets
from engines.lora.apply import AdapterModules
from engines.lora.context import AdapterContext
from engines.lora.format.pairs import LoraPair
from engines.lora.format.targets import LoraTargets, TargetKind
from engines.lora.format.weights import AdapterWeights
from engines.model.loader import load_model
from engines.planning.block_pool import TRASH_BLOCK
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, NO_SLOT, TokenSequence
from engines.tensors.batch import build_batch
from tests.support.engines.engine_harness import engine_config, prompt_of, request
from tests.support.engines.runners import runner_of
from tests.support.engines.tiny_models import CONFIGS
from tests.support.files.lora_files import random_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def sequence(length: int, slot: int, first_block: int = TRASH_BLOCK) -> TokenSequence:
    made = TokenSequence.of(request(prompt_of(length)), NO_SINK)
    made.slot = slot
    made.blocks = list(range(first_block, first_block - (-length // 16)))
    return made


def context_of(*slots_and_lengths: tuple[int, int]) -> AdapterContext:
    context = AdapterContext()
    chunks = [Chunk(sequence(length, slot), 0, length) for slot, length in slots_and_lengths]
    context.set(build_batch(chunks, 16, CPU))
    return context


def pair(rank: int, inputs: int, outputs: int, *lead: int, scale: float = 0.5) -> LoraPair:
    return LoraPair(torch.randn(*lead, rank, inputs), torch.randn(*lead, outputs, rank), scale)


def weights(**pairs: LoraPair) -> AdapterWeights:
    return AdapterWeights("", 8, 0, {name.replace("__", "."): value for name, value in pairs.items()})


def delta(x: torch.Tensor, one: LoraPair) -> torch.Tensor:
    return one.scale * (x @ one.A.T @ one.B.T)


class Toy(nn.Module):
    """A linear layer, an output head that sees some rows, an embedding, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 6)
        self.linear = nn.Linear(6, 9)
        self.router = ToyRouter()
        self.head = nn.Linear(9, 5, bias=False)


class ToyRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 9))
        self.kind = "a router"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).softmax(dim=-1)


KINDS = {
    "embed": TargetKind.EMBEDDING,
    "linear": TargetKind.LINEAR,
    "router": TargetKind.ROUTER,
    "head": TargetKind.LINEAR,
}


def modules_of(model: nn.Module, context: AdapterContext) -> AdapterModules:
    return AdapterModules(model, context, adaptable=KINDS, head="head", dtype=torch.float32, device=CPU)


def test_each_row_gets_its_own_adapter_of_its_own_rank() -> None:
    context = context_of((0, 3), (NO_SLOT, 2), (5, 2))
    model = Toy()
    modules = modules_of(model, context)
    x = torch.randn(1, 7, 6)
    base = model.linear(x)
    first, second = pair(2, 6, 9), pair(7, 6, 9, scale=-2.0)
    modules.install(0, weights(linear=first))
    modules.install(5, weights(linear=second))
    expected = base.clone()
    expected[0, :3] += delta(x[0, :3], first)
    expected[0, 5:] += delta(x[0, 5:], second)
    torch.testing.assert_close(model.linear(x), expected)


def test_the_output_head_is_adapted_in_the_wanted_rows() -> None:
    context = context_of((NO_SLOT, 3), (2, 2))
    model = Toy()
    one = pair(3, 9, 5)
    modules_of(model, context).install(2, weights(head=one))
    x = torch.randn(1, 2, 9)  # the last row of each sequence
    expected = model.head.base(x)
    expected[0, 1] += delta(x[0, 1], one)
    torch.testing.assert_close(model.head(x), expected)


def test_an_embedding_is_adapted_by_the_columns_of_its_tokens() -> None:
    context = context_of((1, 2), (NO_SLOT, 2))
    model = Toy()
    one = pair(3, 400, 6)
    modules_of(model, context).install(1, weights(embed=one))
    ids = torch.tensor([[7, 399, 7, 0]])
    expected = model.embed.base(ids)
    expected[0, :2] += one.scale * (one.A[:, ids[0, :2]].T @ one.B.T)
    torch.testing.assert_close(model.embed(ids), expected)


def test_a_router_is_adapted_before_what_it_does_with_its_scores() -> None:
    context = context_of((NO_SLOT, 2), (4, 3))
    model = Toy()
    one = pair(2, 9, 4)
    modules_of(model, context).install(4, weights(router=one))
    x = torch.randn(5, 9)
    scores = F.linear(x, model.router.weight)
    scores[2:] += delta(x[2:], one)
    torch.testing.assert_close(model.router(x), scores.softmax(dim=-1))
    assert model.router.kind == "a router", "models read other attributes of their modules"


def test_what_is_removed_leaves_the_bits_of_the_base() -> None:
    context = context_of((0, 2), (1, 2))
    model = Toy()
    x = torch.randn(1, 4, 6)
    base = model.linear(x)
    modules = modules_of(model, context)
    modules.install(0, weights(linear=pair(2, 6, 9)))
    modules.install(1, weights(linear=pair(2, 6, 9)))
    modules.remove(0)
    assert torch.equal(model.linear(x)[0, :2], base[0, :2])
    assert not torch.equal(model.linear(x)[0, 2:], base[0, 2:])
    modules.remove(1)
    assert torch.equal(model.linear(x), base)


def test_rows_of_a_layer_that_is_called_with_some_of_them_keep_their_adapters() -> None:
    context = context_of((0, 3), (1, 2))
    model = Toy()
    ones = [pair(2, 6, 9), pair(2, 6, 9)]
    modules = modules_of(model, context)
    for slot, one in enumerate(ones):
        modules.install(slot, weights(linear=one))
    x = torch.randn(1, 2, 6)
    with context.narrowed(torch.tensor([4, 0])):
        found = model.linear(x)
    expected = model.linear.base(x)
    expected[0, 0] += delta(x[0, 0], ones[1])
    expected[0, 1] += delta(x[0, 1], ones[0])
    torch.testing.assert_close(found, expected)
    assert [group.slot for group in context.rows] == [0, 1]


def test_a_prepared_adapter_is_in_the_models_dtype_and_holds_no_more_memory_than_it_says() -> None:
    content = torch.randn(1000)
    views = LoraPair(content[:12].view(2, 6), content[50:68].view(9, 2), 1.0)
    model = Toy()
    for dtype in (torch.bfloat16, torch.float32):
        modules = AdapterModules(model, AdapterContext(), adaptable=KINDS, head="head", dtype=dtype, device=CPU)
        prepared = modules.prepare(weights(linear=views))
        matrices = [prepared.pairs["linear"].A, prepared.pairs["linear"].B]
        assert {matrix.dtype for matrix in matrices} == {dtype}
        assert prepared.nbytes == sum(matrix.untyped_storage().nbytes() for matrix in matrices) == 30 * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "largest", "over"), [(torch.float16, 65504.0, 65536.0), (torch.bfloat16, 3e38, 3.4e38)]
)
def test_values_beyond_the_models_dtype_are_refused(dtype: torch.dtype, largest: float, over: float) -> None:
    modules = AdapterModules(Toy(), AdapterContext(), adaptable=KINDS, head="head", dtype=dtype, device=CPU)
    one = pair(2, 6, 9)
    one.B[3, 1] = largest
    modules.prepare(weights(linear=one))
    one.B[3, 1] = over
    with pytest.raises(AdapterRefused, match=r"matrices for 'linear' hold values over .*, the largest of the model's "):
        modules.prepare(weights(linear=one))


def test_a_module_that_cannot_be_adapted_is_refused_by_name_before_anything_is_changed() -> None:
    model = Toy()
    modules = modules_of(model, AdapterContext())
    with pytest.raises(AdapterRefused, match=r"The adapter changes 'vision\.proj', which this engine does not adapt"):
        modules.prepare(weights(linear=pair(2, 6, 9), vision__proj=pair(2, 6, 9)))
    assert type(model.linear) is nn.Linear


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_that_an_adapter_can_name_is_found_adaptable(name: str) -> None:
    model = random_model(name)
    targets = LoraTargets.of(model)
    found = adaptable_targets(
        model,
        targets,
        run=lambda: model(input_ids=torch.tensor([[5, 6, 7]]), logits_to_keep=torch.tensor([2]), use_cache=False),
        num_tokens=3,
    )
    assert found == {path: target.kind for path, target in targets.targets.items()}


class Wild(nn.Module):
    """Layers that do not see one row per token, or not as they seem to."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Linear(4, 4)
        self.twice = ToyRouter()
        self.transposed = ToyRouter()
        self.unused = nn.Linear(4, 4)
        self.plain = nn.Linear(4, 9)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.halves(x[:1])
        y = self.plain(x)
        F.linear(y, self.transposed.weight)  # by somebody else than the module itself
        return self.twice(y) + self.twice(y) + y @ self.transposed.weight.T


def test_layers_that_do_not_see_one_row_for_each_token_are_not_adaptable() -> None:
    model: Any = Wild()
    found = adaptable_targets(model, LoraTargets.of(model), run=lambda: model(torch.randn(3, 4)), num_tokens=3)
    assert found == {"plain": TargetKind.LINEAR}


class ToyScaledWordEmbedding(nn.Embedding):
    """As transformers' classes of this name."""

    embed_scale = 3.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale


class ToyNormedEmbedding(nn.Embedding):
    """A row that is looked up is then normalised: it does not change by what an adapter adds to the matrix."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.normalize(super().forward(ids))


class Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(9, 4)
        self.scaled = ToyScaledWordEmbedding(9, 4)
        self.normed = ToyNormedEmbedding(9, 4)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.plain(ids) + self.scaled(ids) + self.normed(ids)


def test_embeddings_that_scale_what_they_look_up_are_adaptable_and_those_that_normalise_it_are_not() -> None:
    model: Any = Lookups()
    found = adaptable_targets(model, LoraTargets.of(model), run=lambda: model(torch.tensor([[5, 6, 7]])), num_tokens=3)
    assert found == {"plain": TargetKind.EMBEDDING, "scaled": TargetKind.EMBEDDING}


def test_an_adapter_for_what_is_not_adaptable_is_refused_by_the_runner() -> None:
    path, config = "model.layers.0.mlp.extra_proj", engine_config("llama")
    runner = runner_of(load_model(config), config)
    with pytest.raises(AdapterRefused, match=f"changes '{path}', which this engine does not adapt on this model"):
        runner.adapters.prepare(weights(**{path: pair(2, 64, 64)}))
