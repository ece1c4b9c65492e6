"""A scheduler at work without a model: its memory holds, for every token, what it was computed from."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engines.interface.protocol import Adapter
from engines.planning.block_pool import BlockPool
from engines.planning.scheduler import Chunk, Scheduler, StepPlan
from engines.planning.sequence import NO_SINK, NO_SLOT, TokenSequence
from tests.support.engines.engine_harness import request

BLOCK = 16
Cell = tuple[str, int]  # adapter, hash of all tokens up to here


class Slots:
    """Adapter slots with pins, least recently used first out; adapters in `loading` are not ready."""

    def __init__(self, count: int, loading: Iterable[str] = ()) -> None:
        self.count = count
        self.loading = set(loading)
        self.resident: list[str] = []
        self.pins: dict[str, int] = {}

    def ready(self, adapter: Adapter) -> bool:
        return adapter.digest not in self.loading

    def pin(self, adapter: Adapter) -> int | None:
        digest = adapter.digest
        if digest in self.resident:
            self.resident.remove(digest)
        elif len(self.resident) == self.count:
            idle = [other for other in self.resident if not self.pins.get(other)]
            if not idle:
                return None
            self.resident.remove(idle[0])
        self.resident.append(digest)
        self.pins[digest] = self.pins.get(digest, 0) + 1
        return _slot_of(digest)

    def unpin(self, slot: int) -> None:
        digest = next(digest for digest in self.resident if _slot_of(digest) == slot)
        self.pins[digest] -= 1


def _slot_of(digest: str) -> int:
    return 1 + int(digest)


@dataclass(slots=True)
class Drive:
    """Runs steps and checks each. `admissions` and `charges` record who was admitted, and every tenant's tokens."""

    scheduler: Scheduler
    pool: BlockPool
    max_running: int
    max_step_tokens: int
    max_step_tokens_decoding: int
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    admissions: list[TokenSequence] = field(default_factory=list)
    charges: dict[str, int] = field(default_factory=dict)
    finished: list[TokenSequence] = field(default_factory=list)
    num_steps: int = 0

    def add(self, *sequences: TokenSequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> StepPlan:
        before = list(self.scheduler.running)
        due = [sequence for sequence in before if sequence.num_pending == 1]
        plan = self.scheduler.plan()
        self._note_admissions(before)
        self._check(plan, due)
        for chunk in (*plan.decode, *plan.prefill):
            self._compute(chunk)
        self.num_steps += 1
        return plan

    def run(self, *, max_steps: int = 100_000) -> None:
        while not self.scheduler.is_idle:
            assert self.step(), "nothing could run although there was work"
            assert self.num_steps < max_steps, "no end in sight"

    def abort(self, sequence: TokenSequence) -> None:
        if sequence not in self.finished:
            self.scheduler.finish(sequence)
            self.finished.append(sequence)

    def _note_admissions(self, before: list[TokenSequence]) -> None:
        for sequence in self.scheduler.running:
            # A preempted sequence may have been admitted again in the same plan.
            if sequence not in before or (sequence.num_pending > 1 and sequence in self.admissions[-1:]):
                self.admissions.append(sequence)
                self._charge(sequence, sequence.num_pending)

    def _charge(self, sequence: TokenSequence, tokens: int) -> None:
        tenant = sequence.request.tenant
        self.charges[tenant] = self.charges.get(tenant, 0) + tokens

    def _check(self, plan: StepPlan, due: list[TokenSequence]) -> None:
        running = self.scheduler.running
        assert len(running) <= self.max_running
        decoding = [chunk.sequence for chunk in plan.decode]
        # Who gave its place up and got another at once is computed anew.
        still_due = [sequence for sequence in due if sequence in running and sequence.num_pending == 1]
        assert still_due == [s for s in decoding if s in due]
        budget = self.max_step_tokens_decoding if any(s in due for s in decoding) else self.max_step_tokens
        new_rows = [chunk for chunk in plan.decode if chunk.sequence not in due]
        assert sum(chunk.length for chunk in (*plan.prefill, *new_rows)) <= budget
        chunks = [*plan.decode, *plan.prefill]
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence in running
            assert 0 < chunk.length <= sequence.num_pending
            assert chunk.start == sequence.num_computed
            assert chunk.end <= len(sequence.blocks) * BLOCK
            assert (sequence.slot != NO_SLOT) is (sequence.request.adapter is not None)

    def _compute(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.end):
            self.cells[_place(sequence, position)] = _cell(sequence, position)
        for position in range(chunk.end):
            assert self.cells[_place(sequence, position)] == _cell(sequence, position), "somebody else's K and V"
        charged = sequence.num_charged
        self.scheduler.commit(chunk)
        if chunk.completes:
            self.scheduler.share(chunk.sequence)
        self._charge(sequence, max(0, chunk.end - charged))
        if chunk.completes:
            sequence.append(hash(_cell(sequence, chunk.end - 1)) % 3)
            if sequence.num_output >= sequence.request.sampling.max_tokens:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)


def _place(sequence: TokenSequence, position: int) -> tuple[int, int]:
    return sequence.blocks[position // BLOCK], position % BLOCK


def _cell(sequence: TokenSequence, position: int) -> Cell:
    return sequence.adapter_digest, hash(tuple(sequence.token_ids[: position + 1]))


def drive(
    *,
    num_blocks: int = 1000,
    slots: Slots | None = None,
    max_running: int = 8,
    max_step_tokens: int = 64,
    max_step_tokens_decoding: int = 32,
    prefix_cache: bool = True,
) -> Drive:
    pool = BlockPool(num_blocks, BLOCK)
    scheduler = Scheduler(
        pool,
        slots or Slots(4),
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_step_tokens_decoding=max_step_tokens_decoding,
        prefix_cache=prefix_cache,
    )
    return Drive(scheduler, pool, max_running, max_step_tokens, max_step_tokens_decoding)


def sequence_of(
    prompt: Iterable[int], max_tokens: int = 8, *, tenant: str = "", adapter: str = "", scored: bool = False
) -> TokenSequence:
    bound = Adapter(adapter, "") if adapter else None
    made = request(
        tuple(prompt), adapter=bound, tenant=tenant, max_tokens=max_tokens, prompt_logprobs=0 if scored else None
    )
    return TokenSequence.of(made, NO_SINK)
