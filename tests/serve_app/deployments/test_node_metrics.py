"""What every node exports, as one text."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serve_app.deployments.node_metrics import NODE_UP, NodeMetrics, merge

HEAD = """# HELP ray_roundhouse_requests_total Requests that ended.
# TYPE ray_roundhouse_requests_total counter
ray_roundhouse_requests_total{replica="a",model="m\u2028x"} 3.0
# HELP ray_node_cpu_count CPUs.
# TYPE ray_node_cpu_count gauge
ray_node_cpu_count{ip="10.0.0.1"} 4.0
# HELP ray_serve_deployment_replica_healthy Health.
# TYPE ray_serve_deployment_replica_healthy gauge
ray_serve_deployment_replica_healthy{replica="a"} 1.0
"""
WORKER = """# HELP ray_roundhouse_queue_seconds Queue.
# TYPE ray_roundhouse_queue_seconds histogram
ray_roundhouse_queue_seconds_bucket{le="+Inf"} 2.0
ray_roundhouse_queue_seconds_count 2.0
ray_roundhouse_queue_seconds_sum 0.5
# HELP ray_roundhouse_requests_total Requests that ended.
# TYPE ray_roundhouse_requests_total counter
ray_roundhouse_requests_total{replica="b"} 4.0
"""


def test_the_samples_of_a_metric_come_together_from_all_nodes() -> None:
    assert merge({"10.0.0.1:1": HEAD, "10.0.0.2:2": WORKER, "[::1]:3": None}) == (
        f"# HELP {NODE_UP} 1 for a node whose metrics are among these.\n# TYPE {NODE_UP} gauge\n"
        f'{NODE_UP}{{node="10.0.0.1:1"}} 1\n{NODE_UP}{{node="10.0.0.2:2"}} 1\n{NODE_UP}{{node="[::1]:3"}} 0\n'
        "# HELP ray_roundhouse_requests_total Requests that ended.\n"
        "# TYPE ray_roundhouse_requests_total counter\n"
        'ray_roundhouse_requests_total{replica="a",model="m\u2028x"} 3.0\n'
        'ray_roundhouse_requests_total{replica="b"} 4.0\n'
        "# HELP ray_serve_deployment_replica_healthy Health.\n"
        "# TYPE ray_serve_deployment_replica_healthy gauge\n"
        'ray_serve_deployment_replica_healthy{replica="a"} 1.0\n'
        "# HELP ray_roundhouse_queue_seconds Queue.\n# TYPE ray_roundhouse_queue_seconds histogram\n"
        'ray_roundhouse_queue_seconds_bucket{le="+Inf"} 2.0\nray_roundhouse_queue_seconds_count 2.0\n'
        "ray_roundhouse_queue_seconds_sum 0.5\n"
    )


names = st.sampled_from(["ray_roundhouse_a_total", "ray_serve_b_total", "ray_node_c_total"])
labels = st.text(st.characters(exclude_characters='\\"\n', exclude_categories=["Cs"]), max_size=5)
samples = st.dictionaries(st.tuples(names, labels), st.integers(0, 10**6), max_size=8)


def exposition(values: dict[tuple[str, str], int], node: int) -> str:
    lines = []
    for name in sorted({name for name, _ in values}):
        lines += [f"# HELP {name} About.", f"# TYPE {name} counter"]
        lines += [f'{name}{{node="{node}",x="{x}"}} {value}' for (of, x), value in values.items() if of == name]
    return "\n".join(lines) + "\n"


@given(st.lists(samples, max_size=4))
def test_a_parser_of_prometheus_finds_every_sample_of_ours_once_and_no_other(nodes: list[dict[tuple[str, str], int]]):
    merged = merge({str(node): exposition(values, node) for node, values in enumerate(nodes)})
    families = list(text_string_to_metric_families(merged))
    assert len({family.name for family in families}) == len(families)
    found = [sample for family in families for sample in family.samples if sample.name != NODE_UP]
    ours = {
        (name, str(node), x): value
        for node, values in enumerate(nodes)
        for (name, x), value in values.items()
        if not name.startswith("ray_node")
    }
    assert {(sample.name, sample.labels["node"], sample.labels["x"]): sample.value for sample in found} == ours
    assert len(found) == len(ours)


@asynccontextmanager
async def exporting(handler: web.Application) -> AsyncIterator[str]:
    """A node's agent; its address."""
    runner = web.AppRunner(handler)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await runner.cleanup()


class Agent:
    """Answers with its text once `go` is set; counts how often it was asked."""

    def __init__(self, text: str, status: int = 200) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self._answer = text, status

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        self.asked += 1
        await self.go.wait()
        return web.Response(text=self._answer[0], status=self._answer[1])


async def started(stack: AsyncExitStack, *agents: Agent) -> Sequence[str]:
    return [await stack.enter_async_context(exporting(agent.app())) for agent in agents]


def test_nodes_that_answer_are_read_and_the_others_are_named() -> None:
    async def check() -> None:
        async with AsyncExitStack() as stack:
            agents = Agent(HEAD), Agent("", 500), Agent(WORKER)
            for agent in agents[:2]:
                agent.go.set()
            nodes = await started(stack, *agents)
            with socket.create_server(("127.0.0.1", 0)) as closed:
                gone = f"127.0.0.1:{closed.getsockname()[1]}"
            metrics = NodeMetrics(lambda: [*nodes, gone], timeout_s=0.5)
            read = (await metrics.read()).decode()
            up = dict(zip([*nodes, gone], (1, 0, 0, 0), strict=True))
            assert {
                node: f'{NODE_UP}{{node="{node}"}} {value}\n' in read for node, value in up.items()
            } == dict.fromkeys(up, True)
            assert 'replica="a"' in read
            assert 'replica="b"' not in read
            agents[2].go.set()
            await metrics.close()

    asyncio.run(check())


def test_those_who_ask_at_the_same_time_share_one_reading_and_one_that_leaves_ends_it_for_nobody() -> None:
    async def check() -> None:
        async with AsyncExitStack() as stack:
            agent = Agent(HEAD)
            nodes = await started(stack, agent)
            metrics = NodeMetrics(lambda: nodes)
            leaving, *staying = [asyncio.create_task(metrics.read()) for _ in range(5)]
            await asyncio.sleep(0)
            leaving.cancel()
            agent.go.set()
            first, *others = await asyncio.gather(*staying)
            assert others == [first] * 3
            assert agent.asked == 1
            assert await metrics.read() == first
            assert agent.asked == 2
            await metrics.close()

    asyncio.run(check())


def test_closing_ends_a_reading() -> None:
    async def check() -> None:
        async with AsyncExitStack() as stack:
            agent = Agent(HEAD)
            metrics = NodeMetrics(lambda: nodes)
            nodes = await started(stack, agent)
            asking = asyncio.create_task(metrics.read())
            await asyncio.sleep(0)
            await metrics.close()
            with pytest.raises(asyncio.CancelledError):
                await asking
            agent.go.set()

    asyncio.run(check())
