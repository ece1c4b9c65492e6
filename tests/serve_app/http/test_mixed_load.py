"""The mixed load of the soak, on a service without Ray: what it finds right, and that it finds what is wrong."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engines.interface.config import EngineConfig
from engines.torch_engine import TorchEngine
from serve_app.checkpoints import CheckpointStore
from tests.support.files.lora_files import write_vision_adapter
from tests.support.harness import CHAT, KEY, RunningEdge, running_edge
from tests.support.processes.demo_modules import ROOT
from tests.support.soak.kinds import Kind, Subjects
from tests.support.soak.load import Load, Tally, under
from tests.support.soak.passing import PassingCheckpoints
from tests.support.soak.vitals import under_way
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.edge_fixtures",)
VISION, SOURCE = "roundhouse/tiny-vision", str(ROOT / "cluster" / "examples" / "tiny-vision")
KINDS = Subjects(CHAT, longest=16).kinds()
SERVED = "completion, streamed"


def load_of(edge: RunningEdge, kinds: list[Kind], key: str = KEY, answers: int = 30) -> Tally:
    """What the clients saw, once there are so many answers."""
    with under(Load(edge.url.removesuffix("/v1"), key, kinds, clients=8)) as tally:
        eventually(lambda: tally.answered >= answers, 60)
    return tally


def test_a_service_that_keeps_its_contract_has_no_fault(edge: RunningEdge) -> None:
    with under(Load(edge.url.removesuffix("/v1"), KEY, KINDS, clients=16)) as tally:
        eventually(lambda: {name for name, _ in tally.outcomes} >= {kind.name for kind in KINDS}, 60)
    assert tally.faults == []
    assert tally.served(SERVED) > 0
    assert tally.firsts_s
    assert tally.gaps_s


def test_an_answer_that_is_not_allowed_is_a_fault(edge: RunningEdge) -> None:
    good = [kind for kind in KINDS if kind.must_get is None and "leaver" not in kind.name]
    refused = load_of(edge, good, key="rh-no-such-key")
    assert len(refused.faults) == refused.answered
    bad = [replace(kind, must_get=(400, None)) for kind in good]
    served = load_of(edge, bad)
    assert len(served.faults) == served.answered


def test_a_reply_of_another_shape_is_a_fault(edge: RunningEdge) -> None:
    """A chat's reply, read as a completion's."""
    (chat,) = [kind for kind in KINDS if kind.name == "chat"]
    (stream,) = [kind for kind in KINDS if kind.name == SERVED]
    swapped = [replace(stream, body=chat.body), replace(chat, body=stream.body)]
    tally = load_of(edge, swapped)
    assert len(tally.faults) == tally.answered


def test_what_is_under_way_is_read_from_metrics_of_all_replicas() -> None:
    lines = [
        'ray_roundhouse_engine_running{model="a",replica="1"} 0.0',
        'ray_roundhouse_engine_running{model="a",replica="2"} 2.0',
        'ray_roundhouse_engine_waiting{model="a",replica="2"} 0.0',
        'ray_roundhouse_engine_blocks{model="a",replica="1"} 100.0',
        'ray_roundhouse_engine_blocks_free{model="a",replica="1"} 97.0',
        'ray_serve_requests{model="a",replica="1"} 9.0',
    ]
    assert under_way("\n".join(lines)) == {"engine_running": 2.0, "engine blocks in use": 3.0}
    assert under_way("\n".join([lines[0], lines[2], lines[3], lines[4].replace("97", "100")])) == {}


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[RunningEdge]:
    """A vision model on the torch engine, with few places, two adapters at a time, and checkpoints below `tmp_path`."""
    store = tmp_path / "store"
    store.mkdir()
    config = {
        "models": [{"id": VISION, "app": "tiny", "source": SOURCE}],
        "keys": [{"name": "test", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
        "images": {"app": "images"},
        "checkpoints": {"roots": [str(store)]},
    }
    few = {"max_running": 8, "max_waiting": 12, "max_adapters": 2, "context_length": 512, "kv_cache_bytes": 1_081_344}
    settings = EngineConfig(source=SOURCE, threads=1, **few)
    with running_edge(config, lambda: TorchEngine(settings), open_checkpoints=CheckpointStore.of) as edge:
        yield edge


@pytest.mark.slow
def test_images_and_passing_checkpoints_at_saturation_leave_the_engine_empty(
    cramped: RunningEdge, tmp_path: Path
) -> None:
    template = write_vision_adapter(tmp_path / "template", VISION)
    with closing(PassingCheckpoints(tmp_path / "store", template, VISION)) as passing:
        passing.pass_on()
        kinds = Subjects(VISION, VISION, passing.name).kinds()
        began = time.monotonic()
        with under(Load(cramped.url.removesuffix("/v1"), KEY, kinds, clients=40)) as tally:
            while time.monotonic() < began + 20:
                answered = tally.answered
                eventually(lambda answered=answered: tally.answered >= answered + 40, 60)
                passing.pass_on()
    assert tally.faults == []
    assert min(tally.served(kind) for kind in ("chat", "completion, streamed", "image", "checkpoint")) > 0
    eventually(lambda: cramped.engine.stats().running == cramped.engine.stats().waiting == 0)  # of those that left
    stats = cramped.engine.stats()
    assert stats.counters.adapter_evictions > 0
    assert (stats.running, stats.waiting, stats.queued_tokens, stats.adapter_slots_pinned) == (0, 0, 0, 0)
    assert stats.blocks_free == stats.blocks_total
