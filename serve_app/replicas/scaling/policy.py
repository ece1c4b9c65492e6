"""The autoscaling policy of a model: replicas for the work that runs, and for the prompts that wait.

Serve's own policy counts requests. A request of 100 tokens and one of 100,000 then count alike, and a queue counts no
more than requests that run. This one adds two needs:

- For what comes: of each replica the share of its KV cache, of its batch, or of the prompts that it can compute,
  whichever is nearest to its target.
- For what waits: the time that the replicas need for their queued prompts, divided by the time that it may take.

Prompts count by the rate at which the replica computes them (`prompt_queue.py`), so one target suits all models.

Serve's controller gets this module pickled by value, and its process may lack our packages. So it imports none.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

Stats = Mapping[str, Mapping[object, float]]
"""By name, the value of each replica (`Replica.record_autoscaling_stats`)."""


class Sample(Protocol):
    """One value that a replica told."""

    value: float


class Limits(Protocol):
    """Serve's settings of the deployment."""

    def get_target_ongoing_requests(self) -> float: ...


class Context(Protocol):
    """What Serve tells a policy. `aggregated_metrics`: averages over the look-back period."""

    current_num_replicas: int
    target_num_replicas: int
    total_num_requests: float
    aggregated_metrics: Stats | None
    raw_metrics: Mapping[str, Mapping[object, Sequence[Sample]]] | None
    config: Limits


class LoadPolicy:
    """Serve applies its delays and bounds to what this returns."""

    def __init__(self, *, target_batch: float, target_kv: float, drain_s: float) -> None:
        """`target_batch`, `target_kv`: the shares of batch and KV cache that a replica should use; the first also that
        of the prompts that it can compute. `drain_s`: the time in which queued prompts should be computed.
        """
        self._target_batch = target_batch
        self._target_kv = target_kv
        self._drain_s = drain_s

    def __call__(self, ctx: Context) -> tuple[float, dict[str, object]]:
        """The number of replicas that the load needs, not rounded. Serve starts the first replica of a model itself."""
        if ctx.current_num_replicas == 0:
            return ctx.target_num_replicas, {}
        raw = ctx.raw_metrics or {}
        latest = {name: {r: told[-1].value for r, told in of.items() if told} for name, of in raw.items()}
        if not latest.get("kv_used_fraction"):  # no replica has told anything yet
            return ctx.total_num_requests / ctx.config.get_target_ongoing_requests(), {}
        # The latest values show a burst at once. The averages keep a short lull from taking replicas away.
        needed = max(self.needed(latest), self.needed(ctx.aggregated_metrics or {}))
        return max(needed, 1.0 if ctx.total_num_requests > 0 else 0.0), {}

    def needed(self, stats: Stats) -> float:
        cache, batch, prompts = (
            stats.get(name, {}) for name in ("kv_used_fraction", "batch_used_fraction", "prompt_load")
        )
        coming = sum(
            max(
                used / self._target_kv,
                batch.get(replica, 0.0) / self._target_batch,
                prompts.get(replica, 0.0) / self._target_batch,
            )
            for replica, used in cache.items()
        )
        return coming + sum(stats.get("queued_s", {}).values()) / self._drain_s
