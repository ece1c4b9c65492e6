"""Who goes next."""

from collections.abc import Iterable

from engines.interface.protocol import Adapter
from engines.planning import fair_queue
from engines.planning.fair_queue import FairQueue
from engines.planning.sequence import NO_SINK, TokenSequence
from tests.support.engines.engine_harness import request


def waiting(tenant: str = "", adapter: str = "") -> TokenSequence:
    bound = Adapter(adapter, "") if adapter else None
    return TokenSequence.of(request((1, 2), adapter=bound, tenant=tenant), NO_SINK)


def joined(queue: FairQueue, sequences: Iterable[TokenSequence]) -> list[TokenSequence]:
    sequences = list(sequences)
    for sequence in sequences:
        queue.join(sequence)
    return sequences


def admit_next(queue: FairQueue, tokens: int) -> TokenSequence:
    sequence = next(queue.heads())
    queue.admit(sequence, tokens)
    return sequence


def test_requests_of_one_tenant_and_adapter_go_in_order_of_arrival() -> None:
    queue = FairQueue()
    sequences = joined(queue, [waiting() for _ in range(3)])
    assert [admit_next(queue, 10) for _ in range(3)] == sequences
    assert not len(queue)


def test_tenants_take_turns_by_what_they_were_charged() -> None:
    queue = FairQueue()
    joined(queue, [*(waiting("small") for _ in range(9)), *(waiting("large") for _ in range(9))])
    turns = []
    for _ in range(8):
        head = next(queue.heads())
        queue.admit(head, 30 if head.request.tenant == "large" else 10)
        turns.append(head.request.tenant)
    assert turns.count("small") == 6
    assert turns.count("large") == 2


def test_adapters_of_one_tenant_take_turns_and_other_tenants_do_not_pay_for_them() -> None:
    queue = FairQueue()
    joined(queue, [waiting("a", "x") for _ in range(6)])
    joined(queue, [waiting("a", "y") for _ in range(6)])
    joined(queue, [waiting("b") for _ in range(6)])
    turns = [admit_next(queue, 5) for _ in range(8)]
    assert sum(sequence.request.tenant == "b" for sequence in turns) == 4
    assert sum(sequence.adapter_digest == "x" for sequence in turns) == 2


def test_the_heads_are_the_first_of_each_tenant_and_adapter() -> None:
    queue = FairQueue()
    first = [waiting("a"), waiting("a", "x"), waiting("b", "x")]
    joined(queue, first)
    joined(queue, [waiting("a"), waiting("a", "x"), waiting("b", "x")])
    assert set(queue.heads()) == set(first)
    assert len(queue) == 6


def test_what_was_preempted_goes_before_the_others_in_its_old_order() -> None:
    queue = FairQueue()
    older, younger, last = joined(queue, [waiting() for _ in range(3)])
    queue.admit(older, 5)
    queue.admit(younger, 5)
    queue.put_back(younger)  # the youngest is preempted first
    queue.put_back(older)
    assert [admit_next(queue, 5) for _ in range(3)] == [older, younger, last]


def test_a_tenant_that_was_away_has_no_credit() -> None:
    queue = FairQueue()
    joined(queue, [waiting("old") for _ in range(40)])
    for _ in range(20):
        admit_next(queue, 100)
    joined(queue, [waiting("new") for _ in range(20)])
    turns = [admit_next(queue, 100).request.tenant for _ in range(10)]
    assert turns.count("new") in (5, 6)


def test_a_tenant_that_waited_for_an_adapter_has_no_credit() -> None:
    queue = FairQueue()
    joined(queue, [waiting("blocked", "slow") for _ in range(20)])
    joined(queue, [waiting("steady") for _ in range(40)])
    for _ in range(20):
        # The head of "blocked" cannot be admitted; the scheduler takes the next one.
        queue.admit(next(head for head in queue.heads() if head.request.tenant == "steady"), 100)
    turns = [admit_next(queue, 100).request.tenant for _ in range(10)]
    assert turns.count("blocked") in (5, 6)


def test_tenants_that_send_one_request_after_the_other_do_not_starve_one_that_waits() -> None:
    queue = FairQueue()
    joined(queue, [waiting("patient") for _ in range(50)])
    admit_next(queue, 10)
    turns: list[str] = []
    for _ in range(40):
        serial = joined(queue, [waiting("serial")])[0]
        turns.append(admit_next(queue, 10).request.tenant)
        if turns[-1] == "patient":
            queue.remove(serial)
        queue.retire(serial)
    assert 18 <= turns.count("patient") <= 22


def test_ever_new_tenants_do_not_starve_one_that_waits() -> None:
    queue = FairQueue()
    joined(queue, [waiting("patient") for _ in range(3)])
    admit_next(queue, 10)
    served = 0
    for number in range(4 * fair_queue.IDLE_SHARES_LIMIT):
        passer = joined(queue, [waiting(f"passer-{number}")])[0]
        if admit_next(queue, 10) is passer:
            queue.retire(passer)
        else:
            served += 1
            queue.remove(passer)
            queue.retire(passer)
        if served == 2:
            break
    assert served == 2


def test_a_tenant_that_was_just_served_goes_after_one_that_was_not() -> None:
    queue = FairQueue()
    for _ in range(1000):
        sequence = joined(queue, [waiting("only")])[0]
        queue.admit(sequence, 10)
        queue.retire(sequence)
    fresh = joined(queue, [waiting("other"), waiting("only")])
    assert next(queue.heads()) is fresh[0]


def test_a_request_that_is_taken_out_of_the_middle_leaves_the_others_in_order() -> None:
    queue = FairQueue()
    first, second, third = joined(queue, [waiting() for _ in range(3)])
    queue.remove(second)
    queue.retire(second)
    assert len(queue) == 2
    assert [admit_next(queue, 1) for _ in range(2)] == [first, third]
