"""More requests than a model takes: those that do not fit are told to come back."""

import asyncio

import httpx
import pytest

from tests.e2e.service_config import KEY, MODEL
from tests.support.waiting import eventually

FITTING = 64 + 200  # max_running and max_waiting of the model
TOO_MANY = 60
LONG = 2000  # tokens, of 10 ms each: none ends before the last request has come


@pytest.mark.slow
def test_what_does_not_fit_the_queue_is_429_and_room_comes_back_with_those_who_leave(service):
    body = {"model": MODEL, "prompt": "x", "max_tokens": LONG}

    async def first_answers() -> list[httpx.Response]:
        client = httpx.AsyncClient(
            base_url=f"{service.url}/v1",
            headers={"authorization": f"Bearer {KEY}"},
            limits=httpx.Limits(max_connections=None),
            timeout=120,
        )
        async with client:
            asked = [asyncio.create_task(client.post("/completions", json=body)) for _ in range(FITTING + TOO_MANY)]
            answers = [await answer for _, answer in zip(range(TOO_MANY), asyncio.as_completed(asked), strict=False)]
            assert sum(task.done() for task in asked) == TOO_MANY
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        return answers

    for answer in asyncio.run(first_answers()):
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert answer.json()["error"]["code"] == "overloaded"
    eventually(service.is_idle)
    assert service.sdk().completions.create(model=MODEL, prompt="x", max_tokens=3).usage.completion_tokens == 3
