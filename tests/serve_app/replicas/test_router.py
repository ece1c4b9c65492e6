"""Which replica is chosen."""

import statistics
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serve_app.replicas.reports import ReplicaState
from serve_app.replicas.router import Candidate, Patience, Wish, candidate_of, choose
from serve_app.replicas.status import Load, adapter_key
from tests.support.replicas.routing_simulation import Settings, Simulation

PATIENCE = Patience(factor=1.5, least=4)
IDLE = [Candidate(f"replica-{n}", load=0, capacity=100) for n in range(4)]


def best(candidates: list[Candidate], wish: Wish) -> str:
    return choose(candidates, wish, PATIENCE)[0].replica_id


def test_without_replicas_there_is_no_choice():
    assert choose([], Wish("key", "", "r"), PATIENCE) == []


def test_the_same_key_goes_to_the_same_replica_in_every_process():
    assert {best(IDLE, Wish("key", "", f"r{n}")) for n in range(20)} == {best(IDLE[::-1], Wish("key", "", "other"))}


def test_keys_spread_over_the_replicas():
    counts = Counter(best(IDLE, Wish(f"key-{n}", "", "r")) for n in range(400))
    assert len(counts) == 4
    assert min(counts.values()) > 60


def test_equal_keys_of_two_adapters_are_two_keys():
    assert len({best(IDLE, Wish("key", f"adapter-{n}", "r")) for n in range(30)}) == 4


def test_losing_a_replica_moves_only_the_keys_that_it_had():
    wishes = [Wish(f"key-{n}", "", "r") for n in range(100)]
    before = {wish: best(IDLE, wish) for wish in wishes}
    after = {wish: best(IDLE[1:], wish) for wish in wishes}
    assert all(after[wish] == before[wish] for wish in wishes if before[wish] != "replica-0")


def test_a_replica_that_holds_the_adapter_is_preferred_to_the_keys_own():
    wish = Wish("key", "adapter", "r")
    others = [candidate for candidate in IDLE if candidate.replica_id != best(IDLE, wish)]
    for holder in others:
        candidates = [replace(c, has_adapter=c is holder) for c in IDLE]
        assert best(candidates, wish) == holder.replica_id


def test_a_key_stays_on_its_replica_until_that_is_clearly_busier():
    wish = Wish("key", "", "r")
    own = best(IDLE, wish)

    def with_load(load: int) -> str:
        return best([replace(c, load=load if c.replica_id == own else 8) for c in IDLE], wish)

    # average of 4 replicas with this request: (8 * 3 + load + 1) / 4, times 1.5, rounded down
    assert with_load(13) == own
    assert with_load(14) != own


def test_a_few_requests_never_drive_a_key_away():
    wish = Wish("key", "", "r")
    own = best(IDLE, wish)
    assert best([replace(c, load=3 if c.replica_id == own else 0) for c in IDLE], wish) == own
    assert best([replace(c, load=4 if c.replica_id == own else 0) for c in IDLE], wish) != own


def test_without_any_key_the_least_loaded_replica_is_taken():
    candidates = [replace(c, load=n + 1) for n, c in enumerate(IDLE)]
    assert {best(candidates, Wish("", "", f"r{n}")) for n in range(10)} == {"replica-0"}


def test_without_any_key_idle_replicas_share_the_requests():
    assert len({best(IDLE, Wish("", "", f"r{n}")) for n in range(40)}) == 4


def test_a_full_replica_is_taken_only_when_all_are_full():
    wish = Wish("key", "", "r")
    own = best(IDLE, wish)
    candidates = [replace(c, load=2, capacity=2) if c.replica_id == own else c for c in IDLE]
    order = choose(candidates, wish, PATIENCE)
    assert order[-1].replica_id == own
    full = [replace(c, load=2 + n, capacity=2) for n, c in enumerate(IDLE)]
    assert [c.replica_id for c in choose(full, wish, PATIENCE)] == [c.replica_id for c in full]


def test_a_replica_that_makes_no_progress_comes_last_even_when_it_holds_the_adapter():
    stuck = replace(IDLE[0], has_adapter=True, is_ready=False)
    assert choose([stuck, *IDLE[1:]], Wish("key", "adapter", "r"), PATIENCE)[-1] == stuck


candidates = st.lists(
    st.builds(
        Candidate,
        st.integers(0, 10**6).map(str),
        st.integers(0, 50),
        st.integers(1, 50),
        st.booleans(),
        st.booleans(),
        st.integers(0, 10**4),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.replica_id,
)


@given(candidates, st.builds(Wish, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)))
def test_every_replica_stays_a_candidate_so_that_a_refusal_can_go_to_the_next(given_candidates, wish):
    chosen = choose(given_candidates, wish, PATIENCE)
    assert sorted(c.replica_id for c in chosen) == sorted(c.replica_id for c in given_candidates)


names = st.lists(st.text(max_size=8), min_size=2, max_size=20, unique=True)
wishes = st.builds(Wish, st.text(min_size=1, max_size=5), st.text(max_size=5), st.text(max_size=5))


@given(names, wishes, st.data())
def test_a_key_keeps_its_replica_whatever_the_order_and_whichever_other_replica_leaves(replica_ids, wish, data):
    idle = [Candidate(name, 0, 9) for name in replica_ids]
    own = best(idle, wish)
    assert best(data.draw(st.permutations(idle)), replace(wish, request_id="another")) == own
    gone = data.draw(st.sampled_from([candidate for candidate in idle if candidate.replica_id != own]))
    assert best([candidate for candidate in idle if candidate is not gone], wish) == own


def test_all_conversations_of_a_new_adapter_go_to_one_replica_and_then_share_its_holders():
    idle = [Candidate(f"replica-{n}", 0, 100) for n in range(50)]
    conversations = [Wish(f"conversation {n}", "adapter", "r") for n in range(100)]
    (home,) = {best(idle, wish) for wish in conversations}
    assert best(idle, Wish("", "adapter", "r")) == home
    held = [replace(candidate, has_adapter=n < 4) for n, candidate in enumerate(idle)]
    counts = Counter(best(held, wish) for wish in conversations)
    assert set(counts) == {f"replica-{n}" for n in range(4)}
    assert min(counts.values()) > 10


def test_where_few_places_are_left_on_the_holders_most_conversations_load_the_adapter_elsewhere():
    # Another nine ingresses see the same place at the same time.
    full = [Candidate(f"holder-{n}", 20, 100, has_adapter=True) for n in range(9)]
    place, others = Candidate("place", 10, 100, has_adapter=True), [Candidate(f"other-{n}", 10, 100) for n in range(30)]
    counts = Counter(best([*full, place, *others], Wish(f"c {n}", "adapter", "r")) for n in range(200))
    assert counts["place"] < 200 * 0.8
    assert len(counts) > 4
    assert not any(name.startswith("holder") for name in counts)


def test_requests_without_a_key_do_not_all_go_to_the_lightest_of_many_replicas():
    many = [Candidate(f"replica-{n}", 20 + n % 3, 100) for n in range(200)]
    many[0] = replace(many[0], load=0)
    counts = Counter(best(many, Wish("", "", f"r{n}")) for n in range(200))
    assert 0 < counts["replica-0"] < 25
    loads = {candidate.replica_id: candidate.load for candidate in many}
    assert statistics.mean(loads[name] for name in counts.elements()) < 20.2


def test_a_replica_whose_kv_cache_is_full_comes_after_those_that_have_room():
    wish = Wish("key", "adapter", "r")
    own = best(IDLE, wish)
    cramped = [replace(c, is_cramped=c.replica_id == own, has_adapter=c.replica_id == own) for c in IDLE]
    assert choose(cramped, wish, PATIENCE)[-1].replica_id == own
    assert Load(waiting=1, free_blocks=6, total_blocks=100).is_cramped
    assert not Load(waiting=1, free_blocks=7, total_blocks=100).is_cramped
    assert not Load(waiting=0, free_blocks=0, total_blocks=100).is_cramped


def test_of_two_replicas_with_as_many_requests_the_one_with_fewer_tokens_to_compute_is_lighter():
    two = [Candidate("a", 3, 9, queued_tokens=9000), Candidate("b", 3, 9, queued_tokens=10)]
    assert {best(two, Wish("", "", f"r{n}")) for n in range(10)} == {"b"}


def test_the_load_is_that_of_other_ingresses_as_told_and_of_this_one_as_it_is_now():
    told = ReplicaState("a", load=Load(running=9, waiting=1, queued_tokens=70, others=8), adapters=frozenset({b"k"}))
    candidate = candidate_of(told, b"k", own=5, queue=99, capacity=20)
    assert candidate == Candidate("a", 13, 20, has_adapter=True, queued_tokens=70)


def test_without_a_load_the_queue_length_of_serve_counts():
    untold = ReplicaState("a", adapters=frozenset({adapter_key("d")}))
    assert candidate_of(untold, None, own=2, queue=7, capacity=20) == Candidate("a", 7, 20)
    assert candidate_of(untold, adapter_key("d"), own=8, queue=7, capacity=20) == Candidate("a", 8, 20, True)


def balance(*, hot: float = 0.0) -> tuple[float, int]:
    """The busiest replica over the average, and how many replicas the hot adapter used, at 70 % load."""
    settings = Settings(replicas=20, seconds=4.0, warm_s=8.0, load=0.7, factor=Patience().factor, hot=hot)
    result = Simulation(settings).run()
    return statistics.median(result.ratios), len(result.hot_replicas)


def test_at_70_percent_load_the_busiest_replica_has_at_most_a_fifth_more_than_the_average():
    assert balance()[0] <= 1.2


def test_a_hot_adapter_spreads_over_as_many_replicas_as_it_needs():
    busiest, replicas = balance(hot=0.5)
    assert busiest <= 1.2
    assert replicas >= 9  # half of the requests, at almost the average load
