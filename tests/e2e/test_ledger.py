"""Usage and budgets over two ingresses of a real Ray Serve, one of which is killed."""

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from serve_app.ledger.database import Database
from serve_app.ledger.sums import Amounts, Range, sum_up, total
from tests.e2e.conftest import Service
from tests.e2e.service_config import MODEL, PLAIN_PREFIX
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow
PRICE = {"prompt": 0, "completion": 1_000_000}  # 1 USD a token
BUDGET_USD = 41


@pytest.fixture
def database(session_service: Service, tmp_path: Path) -> Iterator[Database]:
    """Of a ledger that both ingresses keep; the key has a budget. The first service is back afterwards."""
    config = copy.deepcopy(session_service.config)
    for application in config["applications"][:2]:
        user_config = application["deployments"][0]["user_config"]
        user_config["ledger"] = {"directory": str(tmp_path), "write_interval_s": 0.1}
        user_config["keys"][0] |= {"name": "payer", "limits": {"usd_per_day": BUDGET_USD}}
        user_config["models"][0] |= {"price": PRICE, "variants": {"priced": 64}}
    session_service.deploy(config)
    for prefix in ("", PLAIN_PREFIX):  # the models are what an ingress loads last, after the ledger
        eventually(lambda prefix=prefix: f"{MODEL}:priced" in listed(session_service, prefix), 60)
    assert len(list(tmp_path.glob("spool/*"))) == 2  # each ingress has a folder of its own
    opened = Database.of(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    yield opened
    opened.close()
    session_service.deploy(session_service.config)
    eventually(lambda: not list(tmp_path.glob("spool/*")), 60)  # they are written and gone
    eventually(session_service.is_ready, 60)


def listed(service: Service, prefix: str) -> list[str]:
    return [model.id for model in service.sdk(prefix).models.list()]


def used(database: Database) -> Amounts:
    return total(sum_up(database, ("key",), Range(), "payer"))


def wait_for_usd(database: Database, usd: int) -> None:
    eventually(lambda: used(database).cost == usd * 10**12)


def ask(service: Service, prefix: str, max_tokens: int) -> None:
    """A stream, read to its end."""
    sdk = service.sdk(prefix, max_retries=0, timeout=60)
    list(sdk.completions.create(model=MODEL, prompt="x", max_tokens=max_tokens, stream=True))


def ingress(app: str) -> list[int]:
    from ray.serve.context import _get_global_client

    deployment = _get_global_client().get_serve_details()["applications"][app]["deployments"]["ingress"]
    return [replica["pid"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"]


def test_what_two_ingresses_served_is_in_one_ledger_also_when_one_is_killed(
    session_service: Service, database: Database
) -> None:
    for prefix in ("", PLAIN_PREFIX):
        ask(session_service, prefix, 3)
    eventually(lambda: used(database).requests == 2)
    assert used(database).cost == 6 * 10**12
    ask(session_service, "", 4)
    (victim,) = ingress("api")
    os.kill(victim, signal.SIGKILL)  # the reply has ended: its record is on disk
    eventually(lambda: used(database).requests == 3, 60)
    assert used(database).completion_tokens == 10
    eventually(lambda: ingress("api") not in ([], [victim]), 60)
    eventually(session_service.is_ready, 60)
    for number, prefix in enumerate(("", PLAIN_PREFIX, "", PLAIN_PREFIX)):
        wait_for_usd(database, 10 + 10 * number)
        ask(session_service, prefix, 10)
    wait_for_usd(database, 50)  # the last began at 40, below the budget
    for prefix in ("", PLAIN_PREFIX):
        with pytest.raises(openai.RateLimitError, match="it is used up") as refused:
            ask(session_service, prefix, 1)
        assert refused.value.code == "budget_exceeded"
