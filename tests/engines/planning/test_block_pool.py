"""The block pool against a model of it that is as plain as can be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.planning.block_pool import TRASH_BLOCK, BlockPool, prefix_hash, salt_hash

KEYS = [salt_hash(str(i)) for i in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """The model: holders by block, key by published block, and published blocks that nobody holds, oldest first."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 16)
        self.num_blocks = num_blocks
        self.holders: dict[int, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.idle: list[int] = []
        self.held: list[list[int]] = []

    @property
    def num_unpublished_free(self) -> int:
        return self.num_blocks - 1 - len(self.holders) - len(self.idle)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > self.num_unpublished_free + len(self.idle):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        evicted = self.idle[: max(0, count - self.num_unpublished_free)]
        assert {block for block in blocks if block in self.idle} == set(evicted)
        for block in evicted:
            self.idle.remove(block)
            del self.key_of[block]
        for block in blocks:
            assert block not in self.holders
            assert block != TRASH_BLOCK
            self.holders[block] = 1
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted({block for blocks in self.held for block in blocks})))
        self.pool.publish(block, key)
        if block not in self.key_of and key not in self.key_of.values():
            self.key_of[block] = key

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def match(self, keys: list[bytes]) -> None:
        block_of = {key: block for block, key in self.key_of.items()}
        expected = []
        for key in keys:
            if key not in block_of:
                break
            expected.append(block_of[key])
        assert self.pool.match(keys) == expected
        for block in expected:
            self.holders[block] = self.holders.get(block, 0) + 1
            if block in self.idle:
                self.idle.remove(block)
        self.held.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                if block in self.key_of:
                    self.idle.append(block)

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_free + len(self.holders) == self.num_blocks - 1

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for blocks in self.held:
                self.pool.release(blocks)
            assert self.pool.num_free == self.num_blocks - 1
            assert self.pool.allocate(self.num_blocks) is None
            assert sorted(self.pool.allocate(self.num_blocks - 1) or []) == list(range(1, self.num_blocks))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, key in zip(blocks, KEYS, strict=False):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match(KEYS[:3]) == blocks[:2]


def test_a_block_released_twice_is_a_fault_that_shows() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_pool_needs_a_block_beside_the_trash_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 2, not 1"):
        BlockPool(1, 16)


Blocks = st.lists(st.lists(st.integers(0, 2**31), min_size=2, max_size=2), min_size=1, max_size=3)


@given(st.text(), Blocks, st.text(), Blocks)
def test_a_prefix_hash_names_the_salt_and_every_token_before_it(
    salt: str, blocks: list[list[int]], other_salt: str, other_blocks: list[list[int]]
) -> None:
    def chain(salt: str, blocks: list[list[int]]) -> bytes:
        key = salt_hash(salt)
        for block in blocks:
            key = prefix_hash(key, block)
        return key

    same = (salt, blocks) == (other_salt, other_blocks)
    assert (chain(salt, blocks) == chain(other_salt, other_blocks)) is same
