"""One generation while the engine works on it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.interface.protocol import GenerateRequest, Output, OutputSink, Timing, TokenLogprob
from engines.planning.block_pool import prefix_hash, salt_hash
from engines.planning.token_counts import TokenCounts

NO_SLOT = -1
"""The adapter slot of a sequence that runs on the bare base model."""


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Prompt and output tokens of one request, and how far they are computed.

    `token_ids` holds the prompt and then every sampled token. K and V of the first `num_computed` of them lie in
    `blocks`, the first `num_shared` of which are in the prefix cache. After a preemption `num_computed` is 0 again, and
    the sampled tokens are computed anew like a prompt.

    - `prefix_hashes`: the hash chain of the full blocks, as far as it was needed.
    - `num_charged`: how many of the tokens its tenant was charged for.
    - `bypassed`: how many others were admitted while it waited for an adapter slot.
    - `states`: used by `attention.recurrent`; states of layers, by layer and position.
    - `rope`: used by the vision front end; the prompt's rotary positions, if its images have several axes.
    - `num_kept`: used by the sampler; how many tokens truncation kept in its last draw, 0 for none.
    - `submitted_at`, `admitted_at`: on the monotonic clock; the second is of its first admission.
    """

    request: GenerateRequest
    sink: OutputSink
    token_ids: list[int]
    num_prompt: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_shared: int = 0
    prefix_hashes: list[bytes] = field(default_factory=list)
    slot: int = NO_SLOT
    num_charged: int = 0
    cached_len: int | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    _output_counts: TokenCounts | None = None
    _seen_tokens: TokenCounts | None = None
    delivered: bool = False
    bypassed: int = 0
    states: dict[int, dict[int, Any]] = field(default_factory=dict)
    num_kept: int = 0
    rope: Any = None
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None

    @classmethod
    def of(cls, request: GenerateRequest, sink: OutputSink) -> "TokenSequence":
        return cls(request, sink, list(request.prompt_token_ids), len(request.prompt_token_ids))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed yet. 1 makes it a decode row."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def adapter_digest(self) -> str:
        """The digest of its adapter, "" for the bare base model."""
        return self.request.adapter.digest if self.request.adapter else ""

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits after every prompt token are still wanted. A cached prefix does not give them."""
        return self.request.sampling.prompt_logprobs is not None and not self.num_output

    def extend_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks of tokens, all of which must be full."""
        while len(self.prefix_hashes) < num_blocks:
            start = len(self.prefix_hashes) * block_size
            parent = self.prefix_hashes[-1] if self.prefix_hashes else salt_hash(self.adapter_digest)
            end = start + block_size
            self.prefix_hashes.append(prefix_hash(parent, self.token_ids[start:end], self._image_salt(start, end)))
        return self.prefix_hashes[:num_blocks]

    def _image_salt(self, start: int, end: int) -> str:
        """Distinguishes the images with tokens in these places, since all image tokens have the same id."""
        inside = [image for image in self.request.images if image.start < end and start < image.start + image.length]
        return "".join(f"{image.start - start}:{image.digest};" for image in inside)

    def timing(self) -> Timing:
        """Of its first delta, which is made now."""
        now = time.monotonic()
        admitted_at = now if self.admitted_at is None else self.admitted_at
        return Timing(admitted_at - self.submitted_at, now - admitted_at)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self._output_counts is not None:
            self._output_counts.add(token_id)
        if self._seen_tokens is not None:
            self._seen_tokens.add(token_id)

    def counted_outputs(self) -> TokenCounts:
        """How often each token was sampled. Counted in full once, then updated."""
        if self._output_counts is None:
            self._output_counts = TokenCounts(self.token_ids[self.num_prompt :])
        return self._output_counts

    def seen_tokens(self) -> TokenCounts:
        """The distinct tokens of prompt and output. Collected once, then updated."""
        if self._seen_tokens is None:
            self._seen_tokens = TokenCounts(self.token_ids)
        return self._seen_tokens


class _NoSink:
    def deliver(self, outputs: Sequence[Output]) -> None:
        raise AssertionError("the outputs of this sequence have no sink")


NO_SINK: OutputSink = _NoSink()
"""For sequences that the engine computes for itself and emits nothing for."""
