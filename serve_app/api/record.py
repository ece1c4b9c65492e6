"""The record of each request, for metrics, logs and billing. It contains no prompt or reply text."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from engines.interface.protocol import Timing
from serve_app.api.replies.reply import Reply
from serve_app.api.stages import NO_STAGES, Stages
from serve_app.catalog.catalog import ResolvedModel
from serve_app.config.checking.refusal import Refusal
from serve_app.config.price import Price, Tokens
from serve_app.ledger.money import to_pico
from serve_app.ledger.spend import Spend
from serve_app.replicas.token_gaps import TokenGaps

_MAX_ASKED_CHARACTERS = 512
_ROUTES = ("usage", "version", "openapi.json", "metrics")  # besides those that end in more than a word


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"  # the caller's fault
    FAILED = "failed"  # ours
    LEFT = "left"  # the client went away
    UNREAD = "unread"  # the client stayed but did not read


@dataclass(slots=True)
class RequestRecord:
    """One request, filled in as it proceeds. Times in seconds; `status` is the HTTP status, also of a failure after
    the response began.

    `asked_model` is what the caller wrote, which can be any text: use it in the log, never as a metric label. `model`
    is a base id of the catalogue, or a remote endpoint's own name for its model; `checkpoint` is a path. Both are empty
    until the request was accepted. `slug` and `endpoint` are set where a marketplace slug was asked for; `passed_over`
    are the endpoints of it that failed before that one was tried. `is_estimated`: an upstream did not report its usage,
    or more than there can be. `timing`: of the engine that answered. `traceparent`: the caller's span, as sent.
    `started_at`: on the monotonic clock. `client_s`: how long the client took to read. `is_held`: the key's budget
    holds an amount for it. `is_probe`: asks only whether the service is there. `id` is random: clients may choose
    `request_id`.
    """

    request_id: str
    method: str
    path: str
    key_name: str = ""
    asked_model: str = ""
    model: str = ""
    checkpoint: str = ""
    adapter_digest: str = ""
    slug: str = ""
    endpoint: str = ""
    passed_over: tuple[str, ...] = ()
    price: Price | None = None
    streamed: bool = False
    status: int = 0
    error_code: str = ""
    outcome: Outcome = Outcome.DONE
    finish_reason: str = ""
    unparsed: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    image_tokens: int = 0
    is_estimated: bool = False
    is_held: bool = False
    timing: Timing | None = None
    first_token_s: float | None = None
    client_s: float = 0.0
    duration_s: float = 0.0
    is_probe: bool = False
    traceparent: str = ""
    started_at: float = 0.0
    stages: Stages = NO_STAGES
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def about(self, target: ResolvedModel, *, streamed: bool) -> None:
        """Note the model and checkpoint of an accepted request."""
        self.model = target.model.id
        self.checkpoint = "" if target.checkpoint is None else str(target.checkpoint)
        self.adapter_digest = target.adapter.digest if target.adapter is not None else ""
        if not self.slug:
            self.price = target.model.config.price
        self.streamed = streamed

    def try_endpoint(self, slug: str, endpoint: str, price: Price) -> None:
        """Note the endpoint of a slug that is tried next."""
        self.slug, self.endpoint, self.price = slug, endpoint, price

    def about_remote(self, model: str, *, streamed: bool) -> None:
        """Note a remote endpoint's own name for its model. Its tokens are estimated until it counts them."""
        self.model, self.streamed, self.is_estimated = model, streamed, True

    def began(self, timing: Timing | None) -> None:
        """Note what the first token waited for, now that it has come."""
        self.timing = timing
        self.stages.answers(timing)

    def pass_over(self) -> None:
        """Note that this endpoint failed before it had sent anything."""
        self.passed_over = (*self.passed_over, self.endpoint)
        self.endpoint = self.model = self.checkpoint = self.adapter_digest = ""
        self.price, self.is_estimated, self.timing = None, False, None

    @property
    def route(self) -> str:
        """The endpoint of the API as a word out of few: callers can send any path."""
        last = self.path.rstrip("/").rpartition("/")[2]
        if last == "completions":
            return "chat" if self.path.endswith("/chat/completions") else last
        if "/models" in self.path:
            return "models"
        return last if last in _ROUTES else "other"

    @property
    def cost(self) -> Decimal:
        """USD."""
        if self.price is None:
            return Decimal(0)
        return self.price.cost(Tokens(self.prompt_tokens, self.cached_tokens, self.completion_tokens))

    @property
    def spend(self) -> Spend:
        """What budgets count."""
        return Spend(to_pico(self.cost), self.prompt_tokens + self.completion_tokens)

    def asked_for(self, model: object) -> None:
        """Note the model that the body names, before anything is checked."""
        if isinstance(model, str):
            self.asked_model = model[:_MAX_ASKED_CHARACTERS]

    def count(self, reply: Reply) -> None:
        """Note the reply's progress."""
        usage = reply.usage
        self.prompt_tokens = usage.prompt_tokens
        self.cached_tokens = usage.cached_tokens
        self.completion_tokens = usage.completion_tokens
        self.reasoning_tokens = usage.reasoning_tokens
        self.finish_reason = reply.finish_reason or ""
        self.unparsed = reply.malformed


class Recorder(Protocol):
    """Where records go. Called at the start and the end of requests; per token only what `gaps_of` returned is."""

    def request_started(self, record: RequestRecord) -> None: ...

    def request_ended(self, record: RequestRecord) -> None: ...

    def gaps_of(self, model: str) -> TokenGaps:
        """Where the tokens of a base model are counted."""

    def config_checked(self, refusals: Sequence[Refusal]) -> None:
        """Called after every configuration with its refused parts."""


class NullRecorder:
    """Records nothing."""

    def request_started(self, record: RequestRecord) -> None:
        del record

    def request_ended(self, record: RequestRecord) -> None:
        del record

    def gaps_of(self, model: str) -> TokenGaps:
        del model
        return TokenGaps()

    def config_checked(self, refusals: Sequence[Refusal]) -> None:
        del refusals
