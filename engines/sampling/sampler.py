"""Draws the next token of every row, and reports log-probabilities.

A draw depends on the request alone: one uniform number per (seed, output index) from a hash, then the inverse of the
cumulative distribution. So a seeded request gives the same tokens alone and in a batch, after a preemption and after a
restart.

Truncation is top-k, then top-p on the rest, then min-p, in the order of transformers' warpers. It looks at the most
likely candidates only, and widens the search for the rows that need it. So no row pays for a sort of the whole
vocabulary. Its sums are exact (`order.UNIT`), so a draw does not depend on how far the search went.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engines.interface.protocol import SamplingParams, TokenLogprob
from engines.planning.sequence import TokenSequence
from engines.sampling.order import UNIT, Order
from engines.tensors.transfer import Arriving, rows_of, to_device, with_rows

CANDIDATES = 128
"""How many of the most likely tokens truncation looks at first, on a CPU."""

CANDIDATES_ON_DEVICE = 1024
"""The same on a device: looking at more costs little there, but looking at too few costs a forward."""

_WIDER = 8
"""How many times as many it looks at next."""

_WIDEST = 1024
"""Beyond this, a CPU takes `Order` of the whole row: it costs 2 times as much as 1,024 candidates, whatever is kept."""

_BLOCK = 128
"""Tokens whose weights are summed up at a time; the vocabularies of most models are multiples of it."""

_MASK64 = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for draw `index` of a request: the same on every device and after a restart."""
    digest = blake2b(pack("<QQ", seed & _MASK64, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_id` None: the row's logits were not finite. `logprob` None: not requested."""

    token_id: int | None
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, sequences: Sequence[TokenSequence], *, candidates: int | None = None) -> list[Sampled]:
    """One token per row of `logits` [rows, vocab], any float dtype; `candidates`: see `Draws`."""
    return Draws(logits, sequences, candidates=candidates).collect()


class Draws:
    """One token per row of `logits` [rows, vocab], any float dtype, being drawn. Only `collect` waits for the device.
    Until then nothing may write to logits that are float32.

    `token_ids` [rows] int64, on the device: the next forward can start from them. Where the logits are not finite, the
    token is arbitrary.

    `revised`: rows for which `collect` found another token, since their truncation keeps more than was looked at. They
    are few, because the next draw of their sequence looks at more.

    `candidates`: how many of the most likely tokens truncation looks at first, unless the request's last draw kept
    more. None takes what suits the device.
    """

    def __init__(
        self, logits: torch.Tensor, sequences: Sequence[TokenSequence], *, candidates: int | None = None
    ) -> None:
        self._sequences = sequences
        self._candidates = candidates or (CANDIDATES if logits.device.type == "cpu" else CANDIDATES_ON_DEVICE)
        params = self._params = [sequence.request.sampling for sequence in sequences]
        logits = self._logits = _penalise(logits.float(), sequences, params)
        best, greedy = logits.max(dim=-1)  # NaN wins a max, so this also shows rows that are not finite
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        self._places = {row: place for place, row in enumerate(drawn)}
        if drawn:
            # softmax and cumsum keep to one row; sum and logsumexp split a lone row over threads, and change its bits.
            scaled = _scale(rows_of(logits, drawn), [params[row].temperature for row in drawn])
            self._weights = torch.softmax(scaled, dim=-1)
        self.token_ids, num_kept, is_open = self._draw(greedy)
        self.revised: frozenset[int] = frozenset()
        self._wanted = [row for row, p in enumerate(params) if p.logprobs is not None]
        self._found = Arriving(torch.stack((torch.isfinite(best).long(), self.token_ids, num_kept, is_open)))
        self._scores = Arriving(*self._score(rows_of(self.token_ids, self._wanted))) if self._wanted else None

    def collect(self) -> list[Sampled]:
        """Waits for the device."""
        finite, chosen, num_kept, is_open = self._found.get()[0].tolist()
        unsure = [row for row, is_unsure in enumerate(is_open) if is_unsure and finite[row]]
        drawn = [chosen[row] for row in unsure]
        for row, (token_id, count) in self._widened(unsure).items():
            chosen[row], num_kept[row] = token_id, count
        self.revised = frozenset(row for row, before in zip(unsure, drawn, strict=True) if chosen[row] != before)
        for sequence, count in zip(self._sequences, num_kept, strict=True):
            sequence.num_kept = count
        logprobs = self._reports(chosen) if self._scores is not None else {}
        return [
            Sampled(chosen[row], logprobs.get(row)) if finite[row] else Sampled(None)
            for row in range(len(self._params))
        ]

    def _draw(self, greedy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of each row: a token, how many tokens truncation keeps (0: there is none) and whether it may keep more than
        were looked at, all int64.
        """
        by_width: dict[int, list[int]] = {}
        for row in self._places:
            by_width.setdefault(self._width(row), []).append(row)
        drawn: tuple[torch.Tensor, ...] = greedy, torch.zeros_like(greedy), torch.zeros_like(greedy)
        for width, rows in by_width.items():
            found = self._draw_truncated(width, rows) if width else self._draw_whole(rows)
            drawn = tuple(with_rows(all_, rows, own) for all_, own in zip(drawn, found, strict=True))
        return drawn

    def _width(self, row: int) -> int:
        """How many tokens truncation looks at; 0 without truncation."""
        p = self._params[row]
        if p.top_k == 0 and p.top_p >= 1 and p.min_p <= 0:
            return 0
        vocab, width = self._logits.shape[-1], self._candidates
        # The mass that top-p is a share of is only known once all that top-k keeps are looked at.
        least = p.top_k if p.top_p < 1 and p.top_k < vocab else 0
        while width < max(least, self._sequences[row].num_kept + 1):
            width *= _WIDER
        return min(width, vocab)

    def _numbers(self, rows: list[int]) -> list[float]:
        return [uniform(self._params[row].seed, self._sequences[row].num_output) for row in rows]

    def _weights_of(self, rows: list[int]) -> torch.Tensor:
        return rows_of(self._weights, [self._places[row] for row in rows])

    def _draw_whole(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        numbers = to_device(self._numbers(rows), self._weights.device, torch.float64)
        token_ids = _invert(self._weights_of(rows), numbers)
        return token_ids, torch.zeros_like(token_ids), torch.zeros_like(token_ids)

    def _draw_truncated(self, width: int, rows: list[int]) -> tuple[torch.Tensor, ...]:
        params, weights, numbers = [self._params[row] for row in rows], self._weights_of(rows), self._numbers(rows)
        if width > _WIDEST and weights.device.type == "cpu":
            return _draw_in_order(weights, params, numbers)
        return _draw_among(weights, params, numbers, width)

    def _widened(self, rows: list[int]) -> dict[int, tuple[int, int]]:
        """The tokens of rows whose truncation keeps more than were looked at, and how many each keeps."""
        found: dict[int, tuple[int, int]] = {}
        widths = {row: self._width(row) for row in rows}
        while widths:
            by_width: dict[int, list[int]] = {}
            for row, width in widths.items():
                by_width.setdefault(min(width * _WIDER, self._logits.shape[-1]), []).append(row)
            widths = {}
            for width, together in by_width.items():
                drawn = torch.stack(self._draw_truncated(width, together)).tolist()
                for row, token_id, num_kept, is_open in zip(together, *drawn, strict=True):
                    if is_open:
                        widths[row] = width
                    else:
                        found[row] = token_id, num_kept
        return found

    def _score(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same as the function `_score`, for the rows that want it, under the temperature-scaled distribution
        before truncation.
        """
        own = [self._params[row] for row in self._wanted]
        scaled = _scale(rows_of(self._logits, self._wanted), [p.temperature for p in own])
        return _score(scaled, token_ids, max(p.logprobs or 0 for p in own))

    def _reports(self, chosen: list[int]) -> dict[int, TokenLogprob]:
        assert self._scores is not None
        token_ids = [chosen[row] for row in self._wanted]
        scores = self._scores.get()
        if not self.revised.isdisjoint(self._wanted):
            scores = self._score(to_device(token_ids, self._logits.device))
        reports = zip(self._wanted, _reports(token_ids, *scores), strict=True)
        return {
            row: TokenLogprob(report.token_id, report.logprob, report.top[: self._params[row].logprobs])
            for row, report in reports
        }


Sampler = Callable[[torch.Tensor, Sequence[TokenSequence]], Draws]
"""Begins to draw one token per row of logits [rows, vocab]."""


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], params: SamplingParams) -> list[TokenLogprob]:
    """Log-probabilities of `targets`, the tokens after the rows of `logits` [rows, vocab]; NaN if not finite."""
    assert params.prompt_logprobs is not None
    scaled = _scale(logits.float(), [params.temperature] * len(targets))
    return _reports(targets, *_score(scaled, to_device(targets, logits.device), params.prompt_logprobs))


def _scale(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Logits over temperature, 0 standing for 1. The largest becomes 0 first, so that no temperature overflows."""
    smallest = torch.finfo(logits.dtype).tiny
    divisors = [max(t, smallest) if t else 1.0 for t in temperatures]
    return (logits - logits.amax(dim=-1, keepdim=True)) / to_device(divisors, logits.device, logits.dtype)[:, None]


def _penalise(
    logits: torch.Tensor, sequences: Sequence[TokenSequence], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Apply logit_bias and the penalties to the rows that have them, all rows at once. Presence and frequency count
    output tokens only, repetition the prompt too, as in OpenAI's API and in transformers.
    """
    repeated, counted, biased = _Entries(), _Entries(), _Entries()
    for row, (p, sequence) in enumerate(zip(params, sequences, strict=True)):
        if p.repetition_penalty != 1.0:
            seen = sequence.seen_tokens()
            repeated.add(row, seen.token_ids, seen.counts, p.repetition_penalty, 0.0)
        if p.presence_penalty or p.frequency_penalty:
            outputs = sequence.counted_outputs()
            counted.add(row, outputs.token_ids, outputs.counts, -p.presence_penalty, -p.frequency_penalty)
        if p.logit_bias:
            token_ids, biases = zip(*p.logit_bias, strict=True)
            biased.add(row, array("q", token_ids), array("d", biases), 0.0, 1.0)
    if not (repeated.rows or counted.rows or biased.rows):
        return logits
    logits = logits.clone()
    if repeated.rows:
        where, factors = repeated.tensors(logits)
        scores = logits[where]
        logits[where] = torch.where(scores < 0, scores * factors, scores / factors)
    for entries in (counted, biased):
        if entries.rows:
            where, values = entries.tensors(logits)
            logits[where] = logits[where] + values
    return logits


@dataclass(slots=True)
class _Entries:
    """Places in the logits, each once, and a value for each: `base + slope * count`. Kept in buffers, since a long
    conversation has thousands in every row.
    """

    rows: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    lines: list[tuple[float, float]] = field(default_factory=list)
    token_ids: bytearray = field(default_factory=bytearray)
    counts: bytearray = field(default_factory=bytearray)

    def add(self, row: int, token_ids: "array[int]", counts: "array[float]", base: float, slope: float) -> None:
        if token_ids:
            self.rows.append(row)
            self.lens.append(len(token_ids))
            self.lines.append((base, slope))
            self.token_ids += memoryview(token_ids).cast("B")
            self.counts += memoryview(counts).cast("B")

    def tensors(self, logits: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        lines = np.repeat(np.array(self.lines), self.lens, axis=0)
        values = lines[:, 0] + lines[:, 1] * np.frombuffer(self.counts, dtype=np.float64)
        places = np.repeat(self.rows, self.lens), np.frombuffer(self.token_ids, dtype=np.int64)
        rows, token_ids = to_device(np.stack(places), logits.device)
        return (rows, token_ids), to_device(values, logits.device, logits.dtype)


def _draw_in_order(
    weights: torch.Tensor, params: list[SamplingParams], numbers: list[float]
) -> tuple[torch.Tensor, ...]:
    """The same as `_draw_among` at the width of the vocabulary, on a CPU."""
    rows = zip(weights.numpy(), params, numbers, strict=True)
    token_ids, num_kept = zip(*(_drawn_from(row, p, number) for row, p, number in rows), strict=True)
    return torch.tensor(token_ids), torch.tensor(num_kept), torch.zeros(len(params), dtype=torch.int64)


def _drawn_from(weights: NDArray[np.float32], p: SamplingParams, number: float) -> tuple[int, int]:
    """The token of one row, and how many tokens truncation keeps. Arbitrary where the weights are not finite."""
    if not np.isfinite(weights[0]):
        return 0, 0  # a softmax of what is not finite is NaN everywhere
    order = Order(weights)
    kept = [p.top_k or len(weights), len(weights)]
    if p.top_p < 1:
        mass = order.sum(p.top_k) if 0 < p.top_k < len(weights) else 1 / UNIT
        kept.append(order.reaching(p.top_p * mass))
    if p.min_p > 0:
        kept.append(order.at_least(p.min_p * float(weights.max())))
    num_kept = max(1, min(kept))
    total = order.sum(num_kept)
    # The first token whose sum exceeds the target; rounding can put that at the very end.
    return order.token(order.reaching(min(np.floor(number * total) + 1, total)) - 1), num_kept


def _draw_among(
    weights: torch.Tensor, params: list[SamplingParams], numbers: list[float], width: int
) -> tuple[torch.Tensor, ...]:
    """Draw among the `width` most likely tokens of each row; see `Draws._draw`. A row that is certain gives the same
    token at any width, on any device.
    """
    vocab = weights.shape[-1]
    top, ids = weights.topk(width, dim=-1)  # sorted, most likely first
    ids = _lowest_first(top, ids, vocab)
    probability = top.double()
    amount = (probability / UNIT).floor()
    limits = [(p.top_k or vocab, p.top_p, p.min_p, number) for p, number in zip(params, numbers, strict=True)]
    columns = to_device(limits, weights.device, torch.float64)
    top_k, top_p, min_p = columns[:, 0:1], columns[:, 1:2], columns[:, 2:3]
    keep = torch.arange(width, device=weights.device) < top_k
    kept = amount * keep
    cumulative = kept.cumsum(dim=-1)
    # top-p looks at the distribution that top-k left, renormalised.
    mass = torch.where(top_k < vocab, cumulative[:, -1:], 1 / UNIT)
    keep &= (top_p >= 1) | (cumulative - kept < top_p * mass)
    keep &= probability >= min_p * probability[:, :1]
    keep[:, 0] = True
    # Whether tokens that were not looked at may have to be kept (they may be as likely as the last one; what has no
    # weight is never drawn), and whether the mass that top-p is a share of is still unknown.
    beyond = (keep & (top == top[:, -1:]) & (amount > 0)).any(dim=-1)
    unknown = ((top_p < 1) & (top_k < vocab) & (top_k > width))[:, 0]
    is_open = (beyond | unknown) & (width < vocab)
    picks = _invert(amount * keep, columns[:, 3])
    return ids.gather(1, picks[:, None])[:, 0], keep.sum(dim=-1), is_open.long()


def _lowest_first(top: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """`ids` in the order of `top`; ties, which are common among bfloat16 logits, in ascending order. The order of ties
    in `topk` depends on k and on the device.
    """
    # Of numbers that are not negative the bits are in the order of the values.
    keys = (top.contiguous().view(torch.int32).long() << 32) | (vocab - 1 - ids)
    return vocab - 1 - (keys.sort(dim=-1, descending=True).values & 0xFFFFFFFF)


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first index of each row whose cumulative weight exceeds number * total: the inverse CDF, in float64. It
    searches the sums of blocks first, which are far fewer than the tokens, then within the block.
    """
    filler = -weights.shape[1] % _BLOCK
    blocks = (F.pad(weights, (0, filler)) if filler else weights).reshape(weights.shape[0], -1, _BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = numbers[:, None] * ends[:, -1:]
    block = _first_beyond(ends, target)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    own = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    within = _first_beyond(own.double().cumsum(dim=-1), target - before)
    return (block * _BLOCK + within)[:, 0].clamp_max(weights.shape[1] - 1)


def _first_beyond(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the first place that exceeds the target. Rounding can put the target at the very end. Then the result
    is the last place that adds anything.
    """
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    found = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return found.clamp_max(cumulative.shape[1] - 1)  # where weights are not finite, it may be anything


def _score(scaled: torch.Tensor, targets: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of `targets` [rows]. Then, if requested, those of the `count` most likely tokens [rows, count]
    and their ids.
    """
    logprobs = torch.log_softmax(scaled, dim=-1)
    own = logprobs.gather(1, targets[:, None])[:, 0]
    return (own, *logprobs.topk(min(count, scaled.shape[-1]), dim=-1)) if count else (own,)


def _reports(targets: Sequence[int], own: torch.Tensor, *top: torch.Tensor) -> list[TokenLogprob]:
    if not top:
        return [TokenLogprob(target, value) for target, value in zip(targets, own.tolist(), strict=True)]
    values, ids = (tensor.tolist() for tensor in top)
    return [
        TokenLogprob(target, value, tuple(zip(row_ids, row_values, strict=True)))
        for target, value, row_ids, row_values in zip(targets, own.tolist(), ids, values, strict=True)
    ]
