"""What replicas tell ingresses about themselves, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from serve_app.base.errors import ReplicaLost
from serve_app.replicas.channel.link import Links
from serve_app.replicas.channel.listener import Listener
from serve_app.replicas.status import STATUS_BEAT_S, STATUS_GAP_S, STATUS_LOOK_S, Load, Status
from serve_app.replicas.status_sender import StatusSender
from tests.support.waiting import until


@dataclass
class Told:
    """An ingress, and what it was told."""

    listener: Listener
    statuses: list[Status] = field(default_factory=list)


@dataclass
class Sender:
    """A replica whose status the test says."""

    now: Status = field(default_factory=lambda: Status("", "", True, 7.0, Load(), b"adapters"))
    links: Links = field(default_factory=Links)

    def read(self) -> Status:
        return self.now


async def ingress() -> Told:
    statuses: list[Status] = []
    return Told(await Listener.start("127.0.0.1", on_status=statuses.append), statuses)


@contextlib.asynccontextmanager
async def replica() -> AsyncIterator[tuple[Sender, StatusSender]]:
    made = Sender()
    sender = StatusSender(made.links, made.read)
    try:
        yield made, sender
    finally:
        await sender.close()
        await made.links.close()


def test_an_ingress_is_told_at_once_and_then_what_changes():
    async def main() -> None:
        told = await ingress()
        async with replica() as (made, sender):
            await sender.add(told.listener.endpoint, "app", "id")
            await until(lambda: told.statuses)
            assert told.statuses == [replace(made.now, app="app", replica_id="id")]
            made.now = replace(made.now, is_ready=False)
            await until(lambda: len(told.statuses) > 1)
            assert told.statuses[1] == Status("app", "id", False, 7.0, Load(), None)
            made.now = replace(made.now, adapters=b"others")
            await until(lambda: told.statuses[-1].adapters == b"others")
        await told.listener.close()

    asyncio.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_without_a_change_it_is_told_every_second():
    async def main() -> None:
        told, began = await ingress(), now()
        async with replica() as (_, sender):
            await sender.add(told.listener.endpoint, "app", "id")
            await until(lambda: len(told.statuses) == 3)
            assert 2 * STATUS_BEAT_S <= now() - began < 2 * STATUS_BEAT_S + 10
        await told.listener.close()

    asyncio.run(main())


def test_changes_are_told_together_and_new_requests_sooner_but_never_more_often_than_promised():
    async def main() -> None:
        told = await ingress()

        async def told_per_s(*, soon: bool) -> float:
            before, began = len(told.statuses), now()
            while now() - began < 4 * STATUS_LOOK_S:
                made.now = replace(made.now, load=Load(running=made.now.load.running + 1))
                if soon:
                    sender.tell_soon()
                await asyncio.sleep(0)
            return (len(told.statuses) - before - 1) / (now() - began)

        async with replica() as (made, sender):
            await sender.add(told.listener.endpoint, "app", "id")
            await until(lambda: told.statuses)
            assert await told_per_s(soon=False) <= 1 / STATUS_LOOK_S
            assert 1 / STATUS_LOOK_S < await told_per_s(soon=True) <= 1 / STATUS_GAP_S
        await told.listener.close()

    asyncio.run(main())


def test_each_ingress_is_told_the_requests_of_the_others():
    async def main() -> None:
        one, two = await ingress(), await ingress()
        async with replica() as (made, sender):
            for told in (one, two):
                await sender.add(told.listener.endpoint, "app", "id")
            link = await made.links.to(one.listener.endpoint)
            for number in range(3):
                link.attach(f"r{number}", one.listener.open().stream_id)
            made.now = replace(made.now, load=Load(running=5, others=5))
            await until(lambda: one.statuses and one.statuses[-1].load == Load(running=5, others=2))
            await until(lambda: two.statuses and two.statuses[-1].load == Load(running=5, others=5))
        for told in (one, two):
            await told.listener.close()

    asyncio.run(main())


def test_an_ingress_that_is_gone_no_longer_listens_and_one_that_asks_again_is_told_everything():
    async def main() -> None:
        gone, stays = await ingress(), await ingress()
        async with replica() as (made, sender):
            assert not sender.has_listeners
            for told in (gone, stays):
                await sender.add(told.listener.endpoint, "app", "id")
            await gone.listener.close()
            await until(lambda: len(sender._ingresses) == 1)
            assert sender.has_listeners
            stays.statuses.clear()
            await sender.add(stays.listener.endpoint, "app", "id")
            await until(lambda: any(status.adapters == b"adapters" for status in stays.statuses))
            with pytest.raises(ReplicaLost):
                await sender.add(gone.listener.endpoint, "app", "id")
            await stays.listener.close()
            await until(lambda: not sender.has_listeners)
            assert made.links.open_streams == 0

    asyncio.run(main())
