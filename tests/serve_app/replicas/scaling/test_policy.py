"""How many replicas a load needs, as Serve asks: through its own context, and pickled as it pickles policies."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from serve_app.replicas.scaling.policy import LoadPolicy

DEPLOYMENT = DeploymentID("engine", "m")
KWARGS = {"target_batch": 0.8, "target_kv": 0.8, "drain_s": 30.0}
POLICY = LoadPolicy(**KWARGS)
Told = Mapping[str, float]
SHARES = st.floats(0, 1)
TOLD = st.fixed_dictionaries({"batch_used_fraction": SHARES, "kv_used_fraction": SHARES, "queued_s": st.floats(0, 120)})
REPLICAS = st.lists(TOLD, min_size=1, max_size=8)


def told(*, batch: float = 0.0, kv: float = 0.0, load: float = 0.0, queued_s: float = 0.0) -> Told:
    return {"batch_used_fraction": batch, "kv_used_fraction": kv, "prompt_load": load, "queued_s": queued_s}


def context(
    latest: Sequence[Told], mean: Sequence[Told] | None = None, *, requests: float = 0, running: int | None = None
) -> Any:
    """As Serve's controller makes it."""
    replicas = [ReplicaID(f"r{n}", DEPLOYMENT) for n in range(len(latest))]
    names = {name for one in latest for name in one}

    def by_replica(values: Sequence[Told]) -> dict[str, dict[ReplicaID, float]]:
        return {name: {r: one[name] for r, one in zip(replicas, values, strict=True)} for name in names}

    raw = {
        name: {replica: [TimeStampedValue(0.0, 99.0), TimeStampedValue(1.0, value)] for replica, value in of.items()}
        for name, of in by_replica(latest).items()
    }
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name="engine",
        app_name="m",
        current_num_replicas=len(latest) if running is None else running,
        target_num_replicas=5,
        running_replicas=replicas,
        total_num_requests=requests,
        total_queued_requests=0.0,
        aggregated_metrics=by_replica(latest if mean is None else mean),
        raw_metrics=raw,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=2.0,
        config=AutoscalingConfig(target_ongoing_requests=8),
    )


def needed(*latest: Told, **more: Any) -> float:
    return POLICY(context(latest, **more))[0]


def test_what_is_nearest_to_its_target_counts_for_each_replica() -> None:
    replicas = [told(batch=0.8, kv=0.2), told(batch=0.1, kv=0.4), told(batch=0.5, load=2)]
    assert needed(*replicas) == pytest.approx(1 + 0.5 + 2.5)


def test_a_queue_counts_by_the_time_that_it_takes() -> None:
    assert needed(told(batch=0.8, queued_s=60)) == pytest.approx(3)
    assert needed(told(batch=0.8, queued_s=3)) == pytest.approx(1.1)


def test_a_burst_counts_at_once_and_a_lull_only_when_the_average_has_it_too() -> None:
    busy, idle = told(batch=0.8), told()
    assert needed(busy, mean=[idle]) == pytest.approx(1)
    assert needed(idle, mean=[busy]) == pytest.approx(1)
    assert needed(idle, mean=[idle]) == 0


def test_a_model_without_load_needs_no_replica_and_with_any_request_one() -> None:
    assert needed(told()) == 0
    assert needed(told(), requests=0.1) == 1


def test_before_the_first_replica_has_told_anything_requests_are_counted() -> None:
    assert POLICY(context([{}, {}], requests=24))[0] == 3


def test_while_no_replica_runs_the_target_stays() -> None:
    assert POLICY(context([], running=0))[0] == 5


@given(REPLICAS, st.integers(0, 7), TOLD)
def test_more_load_never_needs_fewer_replicas(replicas: list[Told], index: int, more: Told) -> None:
    index %= len(replicas)
    grown = list(replicas)
    grown[index] = {name: max(value, more[name]) for name, value in replicas[index].items()}
    assert needed(*grown) >= needed(*replicas)


@given(REPLICAS)
def test_what_is_needed_is_bounded_by_what_the_replicas_can_tell(replicas: list[Told]) -> None:
    assert 0 <= needed(*replicas) <= len(replicas) * (8 / 0.8 + 120 / 30) + 1e-9


@given(REPLICAS)
def test_at_its_targets_and_without_a_queue_a_model_stays_as_it_is(replicas: list[Told]) -> None:
    level = [
        {**one, "batch_used_fraction": 0.8, "kv_used_fraction": 0.8, "prompt_load": 0.8, "queued_s": 0.0}
        for one in replicas
    ]
    assert needed(*level) == pytest.approx(len(replicas))


def test_the_controller_can_run_the_policy_without_our_packages(tmp_path: Path) -> None:
    path = "serve_app.replicas.scaling.policy:LoadPolicy"
    policy = AutoscalingPolicy(policy_function=path, policy_kwargs=KWARGS)
    pickled = tmp_path / "policy"
    pickled.write_bytes(policy.get_serialized_policy_def() or b"")
    code = f"""
import sys
from ray import cloudpickle
kind = cloudpickle.loads(open({str(pickled)!r}, "rb").read())
assert kind(**{KWARGS!r}).needed({{"queued_s": {{"r": 60.0}}}}) == 2.0
assert not [name for name in sys.modules if name.startswith(("serve_app", "engines"))]
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
