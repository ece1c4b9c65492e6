"""Plans the next step: which sequences decode, which prompts are prefilled, which are admitted or preempted.

This is continuous batching (Yu et al., "Orca", OSDI 2022) with chunked prefill (Agrawal et al., "Sarathi-Serve", OSDI
2024). Every running sequence decodes in every step. Prompt tokens are computed beside it within a token budget, so a
long prompt never stalls the others.

Preemption is by recompute, as in vLLM: the youngest sequence gives its blocks back and is computed anew later. The
oldest always progresses. There is no deadlock as long as the pool holds one sequence of full length, which the engine
checks when it starts. When all running places are taken, a waiting tenant gets a place of a tenant that has more.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engines.interface.protocol import Adapter
from engines.planning.block_pool import BlockPool
from engines.planning.fair_queue import FairQueue
from engines.planning.places import whom_to_displace
from engines.planning.sequence import NO_SLOT, TokenSequence

BYPASS_LIMIT = 64
"""How many requests may overtake one that waits for an adapter slot. Then all others wait until it has one."""

SCORED_TOKENS = 128
"""Tokens per step of prompts whose log-probabilities are wanted: each needs a row of logits over the vocabulary."""


class AdapterSlots(Protocol):
    """What the scheduler needs of the adapter cache."""

    def ready(self, adapter: Adapter) -> bool:
        """Whether the adapter's weights are in host memory."""

    def pin(self, adapter: Adapter) -> int | None:
        """A slot that holds the (ready) adapter until `unpin`, or None while all slots are pinned by others."""

    def unpin(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` … `start` + `length` - 1 of a sequence, to be computed in one step."""

    sequence: TokenSequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def completes(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end == len(self.sequence.token_ids)

    def block_table(self, block_size: int) -> list[int]:
        """The blocks up to the end of this chunk. Blocks for later tokens still have another sequence's content."""
        return self.sequence.blocks[: -(-self.end // block_size)]


@dataclass(slots=True)
class _Budget:
    """Prompt tokens that the step may still compute, and how many of them with logits."""

    tokens: int
    scored_tokens: int = SCORED_TOKENS


@dataclass(slots=True)
class StepPlan:
    """`decode` chunks have one token each. `prefill` chunks have more, or one when the budget is nearly used up."""

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Scheduler:
    """Owns the queue, the running list and the block tables. Not thread-safe: the engine loop owns it."""

    def __init__(
        self,
        pool: BlockPool,
        slots: AdapterSlots,
        *,
        max_running: int,
        max_step_tokens: int,
        max_step_tokens_decoding: int,
        prefix_cache: bool,
        whole_images: bool = False,
    ) -> None:
        """`whole_images`: all tokens of an image are computed in one step, even beyond the step's budget."""
        self._pool = pool
        self._whole_images = whole_images
        self._slots = slots
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._max_step_tokens_decoding = max_step_tokens_decoding
        self._prefix_cache = prefix_cache
        self.queue = FairQueue()
        self.running: list[TokenSequence] = []
        self.preemptions = 0
        self.prefill_limit: int | None = None  # below `max_step_tokens_decoding`, as the loop measures
        # Requests that were tried and could not be admitted, for lack of a slot or of memory.
        self._lack_slots: set[TokenSequence] = set()
        self._lacks_memory: TokenSequence | None = None

    def add(self, sequence: TokenSequence) -> None:
        self.queue.join(sequence)

    @property
    def is_idle(self) -> bool:
        return not self.running and not len(self.queue)

    def plan(self) -> StepPlan:
        """The next step. Empty when nothing can run now (idle, or adapters are still loading)."""
        crowding = self._crowding()
        if crowding is not None:
            self._preempt(crowding)
        plan = StepPlan()
        for sequence in list(self.running):
            # Oldest first, and only the youngest are preempted, so a row that is in the plan stays there.
            if sequence.blocks and sequence.num_pending == 1 and self._grow(sequence):
                plan.decode.append(Chunk(sequence, sequence.num_computed, 1))
        budget = _Budget(self._prefill_beside_decoding() if plan.decode else self._max_step_tokens)
        for sequence in self.running:
            if sequence.num_pending > 1:
                self._add(plan.prefill, sequence, budget)
        while budget.tokens and (admitted := self._admit_next()):
            self._add(plan.decode if admitted.num_pending == 1 else plan.prefill, admitted, budget)
        self._use_up(plan.prefill, budget)
        return plan

    def plan_ahead(self, drawn: Sequence[Chunk]) -> list[tuple[int, Chunk]]:
        """What certainly follows decode chunks whose tokens are not known yet. Returns the index in `drawn` of each
        chunk that is not at its length, and its next chunk.

        Returns nothing if the next step may do more than decode those: admit a request, also in place of one that ends,
        continue a prompt, or take blocks from others.
        """
        running = [(place, chunk) for place, chunk in enumerate(drawn) if chunk.sequence.blocks]
        if len(running) < len(self.running) or self._may_admit() or self._crowding() is not None:
            return []
        ahead: list[tuple[int, Chunk]] = []
        for place, chunk in running:
            sequence = chunk.sequence
            if sequence.num_output + 1 >= sequence.request.sampling.max_tokens:
                if len(self.queue):
                    return []
                continue
            if not self._extend(sequence, chunk.end):
                return []
            ahead.append((place, Chunk(sequence, chunk.end, 1)))
        return ahead

    def _crowding(self) -> TokenSequence | None:
        """The sequence that must give up its running place: all are taken, and another tenant waits for its share."""
        if len(self.running) < self._max_running or not len(self.queue):
            return None
        # A request without an adapter slot could not use the place, and the one that gave it up would take it back.
        head = next((sequence for sequence in self._candidates([]) if sequence not in self._lack_slots), None)
        if head is None:
            return None
        return whom_to_displace([(s.request.tenant, s) for s in self.running], head.request.tenant)

    def _may_admit(self) -> bool:
        """Whether `_admit_next` would reach a request that it has not tried since anything became free."""
        if len(self.running) >= self._max_running:
            return False
        blocked: list[TokenSequence] = []
        for sequence in self._candidates(blocked):
            if sequence is self._lacks_memory:
                return False
            if sequence not in self._lack_slots:
                return True
            blocked.append(sequence)
        return False

    def _add(self, chunks: list[Chunk], sequence: TokenSequence, budget: _Budget) -> None:
        """Plan as many pending tokens as the budget has. A prompt that needs more than one step anyway gets half as
        many, so that shorter prompts behind it get their first token earlier.
        """
        length = min(budget.tokens, sequence.num_pending)
        if sequence.num_pending > self._max_step_tokens:
            length = min(length, -(-budget.tokens // 2))
        if sequence.scores_prompt:
            length = min(length, budget.scored_tokens)
            budget.scored_tokens -= length
        if length:
            length = self._image_bound(sequence, sequence.num_computed + length) - sequence.num_computed
        budget.tokens = max(0, budget.tokens - length)
        if length:
            chunks.append(Chunk(sequence, sequence.num_computed, length))

    def _image_bound(self, sequence: TokenSequence, end: int) -> int:
        """Where a chunk that would end here ends instead, so that no image is cut. That is before the image, or behind
        it if the chunk would otherwise be empty.
        """
        if not self._whole_images:
            return end
        for image in sequence.request.images:
            if image.start < end < image.start + image.length:
                return image.start if image.start > sequence.num_computed else image.start + image.length
        return end

    def _prefill_beside_decoding(self) -> int:
        most = self._max_step_tokens_decoding
        return most if self.prefill_limit is None else min(most, self.prefill_limit)

    def _grow(self, sequence: TokenSequence) -> bool:
        """Make room for the sequence's next token, preempting the youngest while there is none."""
        while not self._extend(sequence, sequence.num_computed):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _extend(self, sequence: TokenSequence, position: int) -> bool:
        """Whether there is room for the token at this position. Takes a free block for it if needed."""
        if position < len(sequence.blocks) * self._pool.block_size:
            return True
        block = self._pool.allocate(1)
        sequence.blocks += block or []
        return block is not None

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preemptions += 1
        self._let_go(sequence)
        sequence.num_computed = 0
        self.queue.put_back(sequence)

    def _admit_next(self) -> TokenSequence | None:
        """Admit the next request in turn, or a later one if its adapter is not there yet."""
        if len(self.running) >= self._max_running:
            return None
        self._forget_tried()
        blocked: list[TokenSequence] = []
        for sequence in self._candidates(blocked):
            adapter = sequence.request.adapter
            slot = self._slots.pin(adapter) if adapter else NO_SLOT
            if slot is None:
                blocked.append(sequence)
                self._lack_slots.add(sequence)
                continue
            if not self._allocate_prompt(sequence):
                # Memory is short for all: a smaller request must not overtake, or large prompts would starve.
                if slot != NO_SLOT:
                    self._slots.unpin(slot)
                self._lacks_memory = sequence
                return None
            sequence.slot = slot
            for waiting in blocked:
                waiting.bypassed += 1
            self._start(sequence)
            return sequence
        return None

    def _candidates(self, blocked: list[TokenSequence]) -> Iterator[TokenSequence]:
        for sequence in self.queue.heads():
            if any(waiting.bypassed >= BYPASS_LIMIT for waiting in blocked):
                return
            adapter = sequence.request.adapter
            if adapter is None or self._slots.ready(adapter):
                yield sequence

    def _start(self, sequence: TokenSequence) -> None:
        self.queue.admit(sequence, sequence.num_pending)
        sequence.num_charged = len(sequence.token_ids)
        sequence.bypassed = 0
        if sequence.admitted_at is None:
            sequence.admitted_at = time.monotonic()
        self.running.append(sequence)

    def _allocate_prompt(self, sequence: TokenSequence) -> bool:
        """Blocks for all known tokens, as many as possible from the prefix cache."""
        size = self._pool.block_size
        total = -(-len(sequence.token_ids) // size)
        shared: list[int] = []
        if self._prefix_cache and not sequence.scores_prompt:
            # At least one token is left to compute, or there would be no logits to sample from.
            shared = self._pool.match(sequence.extend_hashes((len(sequence.token_ids) - 1) // size, size))
        need = total - len(shared)
        # Room for one more block of every running sequence, so that admitting does not preempt at once.
        room = self._pool.num_free - len(self.running) if self.running else self._pool.num_free
        own = self._pool.allocate(need) if need <= room else None
        if own is None:
            self._pool.release(shared)
            return False
        sequence.blocks = shared + own
        sequence.num_computed = len(shared) * size
        sequence.num_shared = len(shared)
        if sequence.cached_len is None:
            sequence.cached_len = min(sequence.num_computed, sequence.num_prompt)
        return True

    def commit(self, chunk: Chunk) -> None:
        """The chunk was computed: count its tokens."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        if chunk.end > sequence.num_charged:
            self.queue.charge(sequence, chunk.end - sequence.num_charged)
            sequence.num_charged = chunk.end

    def share(self, sequence: TokenSequence) -> None:
        """Publish the sequence's full blocks, once the logits after all computed tokens were finite. A value that is
        not finite spreads to other tokens of its chunk, and every reader of such a block would fail too.
        """
        full = sequence.num_computed // self._pool.block_size
        if self._prefix_cache and full > sequence.num_shared:
            hashes = sequence.extend_hashes(full, self._pool.block_size)
            for index in range(sequence.num_shared, full):
                self._pool.publish(sequence.blocks[index], hashes[index])
            sequence.num_shared = full

    def finish(self, sequence: TokenSequence) -> None:
        """The request has ended, in any way: free everything it holds."""
        if sequence.blocks:
            self._let_go(sequence)
        else:
            self.queue.remove(sequence)
        self.queue.retire(sequence)

    def _let_go(self, sequence: TokenSequence) -> None:
        self._forget_tried()
        self.running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_shared = 0
        sequence.states = {}
        if sequence.slot != NO_SLOT:
            self._slots.unpin(sequence.slot)
            sequence.slot = NO_SLOT

    def _use_up(self, chunks: list[Chunk], budget: _Budget) -> None:
        """Give the rest of the budget to the prompts that continue, oldest first."""
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            more = min(budget.tokens, len(sequence.token_ids) - chunk.end)
            if more and not sequence.scores_prompt:
                more = self._image_bound(sequence, chunk.end + more) - chunk.end
                budget.tokens = max(0, budget.tokens - more)
                chunks[index] = Chunk(sequence, chunk.start, chunk.length + more)

    def _forget_tried(self) -> None:
        self._lack_slots.clear()
        self._lacks_memory = None
