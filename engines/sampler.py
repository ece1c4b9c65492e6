"""Draws the next token of every row, and reports log-probabilities.

A draw depends on the request alone: one uniform number per (seed, output index) from a hash, then the inverse of the
cumulative distribution. So a seeded request gives the same tokens alone and in company, after a preemption and after a
restart. Truncation (top-k, then top-p on what is left, then min-p, in the order of transformers' warpers) looks at the
most likely candidates only and widens the search for the rows that need it, so no row pays for a sort of the whole
vocabulary.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack

import torch

from engines.protocol import SamplingParams, TokenLogprob
from engines.sequence import Sequence

CANDIDATES = 1024
"""How many of the most likely tokens truncation looks at first."""

_MASK64 = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for draw `index` of a request: the same on every device and after a restart."""
    digest = blake2b(pack("<QQ", seed & _MASK64, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_id` None: the row's logits were not finite. `logprob` None: not asked for."""

    token_id: int | None
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[Sampled]:
    """One token per row of `logits` [rows, vocab], any float dtype."""
    logits = logits.float()
    params = [sequence.request.sampling for sequence in sequences]
    logits = _penalise(logits, sequences, params)
    best, ids = logits.max(dim=-1)  # NaN wins a max, so this also shows rows that are not finite
    # One transfer: each would wait for a device.
    finite, chosen = torch.stack((torch.isfinite(best).long(), ids)).tolist()
    drawn = [row for row, p in enumerate(params) if p.temperature > 0 and finite[row]]
    if drawn:
        for row, token_id in zip(drawn, _draw(logits, drawn, sequences), strict=True):
            chosen[row] = token_id
    wanted = [row for row, p in enumerate(params) if p.logprobs is not None and finite[row]]
    logprobs = _logprobs(logits, wanted, chosen, params) if wanted else {}
    return [Sampled(chosen[row] if finite[row] else None, logprobs.get(row)) for row in range(len(params))]


def prompt_logprobs(logits: torch.Tensor, targets: SequenceOf[int], params: SamplingParams) -> list[TokenLogprob]:
    """Log-probabilities of `targets`, the tokens after the rows of `logits` [rows, vocab]; NaN if not finite."""
    assert params.prompt_logprobs is not None
    scaled = _scale(logits.float(), [params.temperature] * len(targets))
    return _report(scaled, targets, params.prompt_logprobs)


def _scale(logits: torch.Tensor, temperatures: SequenceOf[float]) -> torch.Tensor:
    """Logits over temperature, 0 standing for 1. The largest becomes 0 first, so that no temperature overflows."""
    smallest = torch.finfo(logits.dtype).tiny
    divisors = logits.new_tensor([max(t, smallest) if t else 1.0 for t in temperatures])
    return (logits - logits.amax(dim=-1, keepdim=True)) / divisors[:, None]


def _penalise(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], params: SequenceOf[SamplingParams]
) -> torch.Tensor:
    """Apply logit_bias and the penalties to the rows that have them, all rows at once. Presence and frequency count
    output tokens only, repetition the prompt too, as in OpenAI's API and in transformers.
    """
    repeated, counted, biased = _Entries(), _Entries(), _Entries()
    for row, (p, sequence) in enumerate(zip(params, sequences, strict=True)):
        if p.repetition_penalty != 1.0:
            seen = sequence.seen_tokens()
            repeated.add(row, seen, [p.repetition_penalty] * len(seen))
        if p.presence_penalty or p.frequency_penalty:
            counts = sequence.counted_outputs()
            counted.add(row, counts, [-p.presence_penalty - p.frequency_penalty * n for n in counts.values()])
        if p.logit_bias:
            biased.add(row, [token_id for token_id, _ in p.logit_bias], [bias for _, bias in p.logit_bias])
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
            logits.index_put_(where, values, accumulate=True)
    return logits


@dataclass(slots=True)
class _Entries:
    """Places in the logits, and a value for each."""

    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, token_ids: Collection[int], values: SequenceOf[float]) -> None:
        self.rows += [row] * len(token_ids)
        self.token_ids += token_ids
        self.values += values

    def tensors(self, logits: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        rows, token_ids = (torch.tensor(ids, device=logits.device) for ids in (self.rows, self.token_ids))
        return (rows, token_ids), logits.new_tensor(self.values)


def _draw(logits: torch.Tensor, rows: list[int], sequences: SequenceOf[Sequence]) -> list[int]:
    params = [sequences[row].request.sampling for row in rows]
    numbers = [uniform(p.seed, sequences[row].num_output) for row, p in zip(rows, params, strict=True)]
    picked = logits if len(rows) == logits.shape[0] else logits[torch.tensor(rows, device=logits.device)]
    # softmax and cumsum keep to one row; sum and logsumexp split a lone row over threads, which changes its bits.
    weights = torch.softmax(_scale(picked, [p.temperature for p in params]), dim=-1)
    token_ids = [0] * len(rows)
    whole = [i for i, p in enumerate(params) if p.top_k == 0 and p.top_p >= 1 and p.min_p <= 0]
    if whole:
        for i, token_id in zip(whole, _invert(weights[whole], [numbers[i] for i in whole]).tolist(), strict=True):
            token_ids[i] = token_id
    truncated = [i for i in range(len(rows)) if i not in set(whole)]
    width = min(CANDIDATES, logits.shape[-1])
    while truncated:
        found, truncated = _draw_truncated(weights, truncated, params, numbers, width)
        for i, token_id in found:
            token_ids[i] = token_id
        width = min(width * 8, logits.shape[-1])
    return token_ids


def _draw_truncated(
    weights: torch.Tensor, rows: list[int], params: list[SamplingParams], numbers: list[float], width: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Draw among the `width` most likely tokens; returns (row, token) pairs, and the rows that may keep more tokens."""
    own = [params[i] for i in rows]
    vocab = weights.shape[-1]
    top, ids = weights[rows].topk(width, dim=-1)  # sorted, most likely first
    probability = top.double()
    top_k = torch.tensor([p.top_k or vocab for p in own], device=weights.device)[:, None]
    top_p = probability.new_tensor([p.top_p for p in own])[:, None]
    min_p = probability.new_tensor([p.min_p for p in own])[:, None]
    keep = torch.arange(width, device=weights.device) < top_k
    kept = probability * keep
    cumulative = kept.cumsum(dim=-1)
    # top-p looks at the distribution that top-k left, renormalised.
    mass = torch.where(top_k <= width, cumulative[:, -1:], 1.0)
    keep &= (top_p >= 1) | (cumulative - kept < top_p * mass)
    keep &= probability >= min_p * probability[:, :1]
    keep[:, 0] = True
    # Whether later tokens may be kept too, and whether the mass that top-p is a share of is not known yet.
    open_ended = (top_k[:, 0] > width) & (width < vocab) & (keep[:, -1] | ((top_p < 1) & (top_k < vocab))[:, 0])
    sure = [i for i, is_open in enumerate(open_ended.tolist()) if not is_open]
    unsure = [row for row, is_open in zip(rows, open_ended.tolist(), strict=True) if is_open]
    if not sure:
        return [], unsure
    picks = _invert((probability * keep)[sure], [numbers[rows[i]] for i in sure])
    token_ids = ids[sure].gather(1, picks[:, None])[:, 0].tolist()
    return list(zip([rows[i] for i in sure], token_ids, strict=True)), unsure


def _invert(weights: torch.Tensor, numbers: list[float]) -> torch.Tensor:
    """The first index of each row whose cumulative weight exceeds number * total: the inverse CDF, in float64."""
    cumulative = weights.double().cumsum(dim=-1)
    target = cumulative.new_tensor(numbers)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding can put the target at the very end: then the last token that has any weight is meant.
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)


def _logprobs(
    logits: torch.Tensor, rows: list[int], chosen: list[int], params: SequenceOf[SamplingParams]
) -> dict[int, TokenLogprob]:
    """Of the temperature-scaled distribution, before truncation; rows by how many alternatives they want."""
    scaled = _scale(logits[rows], [params[row].temperature for row in rows])
    count = max(params[row].logprobs or 0 for row in rows)
    reports = _report(scaled, [chosen[row] for row in rows], count)
    return {
        row: TokenLogprob(report.token_id, report.logprob, report.top[: params[row].logprobs])
        for row, report in zip(rows, reports, strict=True)
    }


def _report(scaled: torch.Tensor, targets: SequenceOf[int], count: int) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(scaled, dim=-1)
    own = logprobs.gather(1, torch.tensor(targets, device=scaled.device)[:, None])[:, 0].tolist()
    if not count:
        return [TokenLogprob(target, value) for target, value in zip(targets, own, strict=True)]
    top, top_ids = logprobs.topk(min(count, scaled.shape[-1]), dim=-1)
    return [
        TokenLogprob(target, value, tuple(zip(ids, values, strict=True)))
        for target, value, ids, values in zip(targets, own, top_ids.tolist(), top.tolist(), strict=True)
    ]
