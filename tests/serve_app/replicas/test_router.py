"""Which replica is chosen."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serve_app.replicas.router import Candidate, Patience, Wish, choose

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

    # average of 4 replicas with this request: (8 * 3 + load + 1) / 4, times 1.5
    assert with_load(14) == own
    assert with_load(16) != own


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
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.replica_id,
)


@given(candidates, st.builds(Wish, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)))
def test_every_replica_stays_a_candidate_so_that_a_refusal_can_go_to_the_next(given_candidates, wish):
    chosen = choose(given_candidates, wish, PATIENCE)
    assert sorted(c.replica_id for c in chosen) == sorted(c.replica_id for c in given_candidates)
