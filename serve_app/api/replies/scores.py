"""The log-probabilities of a reply that is sent whole, kept until then.

They are stored in arrays, which take an eighth of the memory of the engine's objects.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engines.interface.protocol import TokenLogprob

_NONE = -1


@dataclass(frozen=True, slots=True)
class Scored:
    """A token, its log-probability (None for the first token of a prompt), and the character at which it begins."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int


def _integers() -> "array[int]":
    return array("q")


def _numbers() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Scores:
    """`Scored` values in order; each read creates a new object."""

    token_ids: "array[int]" = field(default_factory=_integers)
    logprobs: "array[float]" = field(default_factory=_numbers)
    offsets: "array[int]" = field(default_factory=_integers)
    top_lens: "array[int]" = field(default_factory=_integers)  # of the alternatives; _NONE: there is no log-probability
    top_ids: "array[int]" = field(default_factory=_integers)
    top_logprobs: "array[float]" = field(default_factory=_numbers)

    @property
    def num_values(self) -> int:
        """Log-probabilities, those of the alternatives included."""
        return len(self.token_ids) + len(self.top_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, scored: Iterable[Scored]) -> None:
        for entry in scored:
            logprob = entry.logprob
            self.token_ids.append(entry.token_id)
            self.offsets.append(entry.offset)
            self.logprobs.append(0.0 if logprob is None else logprob.logprob)
            self.top_lens.append(_NONE if logprob is None else len(logprob.top))
            for token_id, value in () if logprob is None else logprob.top:
                self.top_ids.append(token_id)
                self.top_logprobs.append(value)

    def __iter__(self) -> Iterator[Scored]:
        start = 0
        for index, token_id in enumerate(self.token_ids):
            length = self.top_lens[index]
            if length == _NONE:
                yield Scored(token_id, None, self.offsets[index])
                continue
            end = start + length
            top = tuple(zip(self.top_ids[start:end], self.top_logprobs[start:end], strict=True))
            start = end
            yield Scored(token_id, TokenLogprob(token_id, self.logprobs[index], top), self.offsets[index])
