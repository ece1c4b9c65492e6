"""The options of one engine: a frozen value, checked when it is made.

Every option carries its range and one sentence in its type. The `args` of a model application take these fields
unchanged, and the table of options in the documentation is made from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, Gt, Le, MinLen, MultipleOf
from typing_extensions import Doc

DType = Literal["auto", "bfloat16", "float16", "float32"]
AttentionName = Literal["auto", "sdpa", "native", "triton", "varlen", "flashinfer"]

Count = Annotated[int, Ge(1), Le(1 << 31)]
Bytes = Annotated[int, Ge(1), Le(1 << 44)]
StepTokens = Annotated[int, Ge(1), Le(1 << 20)]
Text = Annotated[str, MinLen(1)]
Seconds = Annotated[float, Gt(0), Le(7 * 86400)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an operator may choose. Raises `ValueError` naming field, limit and value."""

    source: Annotated[Text, Doc("The model: a folder, a `.gguf` file or a hub id.")] = field(kw_only=False)
    revision: Annotated[Text | None, Doc("Branch, tag or commit of a hub id.")] = None
    trust_remote_code: Annotated[
        bool,
        Doc(
            "Whether Python code that comes with the model may run in its engine. Its tokenizer, template and image "
            "processor are always data: no code for them runs."
        ),
    ] = False
    dtype: Annotated[DType, Doc("Type of weights and activations; `auto`: as stored.")] = "auto"
    context_length: Annotated[
        Count | None, Doc("Longest prompt and reply together, in tokens; null: what the model was made for.")
    ] = None
    block_size: Annotated[int, Ge(16), MultipleOf(16), Doc("Tokens in one block of the KV cache.")] = 16
    kv_cache_bytes: Annotated[
        Bytes | None, Doc("Size of the KV cache, on each device; null: see `memory_fraction`.")
    ] = None
    memory_fraction: Annotated[
        float,
        Gt(0),
        Le(1),
        Doc(
            "Share of the memory left after the weights that the KV cache takes without `kv_cache_bytes`. "
            "Engines that start together on one machine each see all of it."
        ),
    ] = 0.5
    prefix_cache: Annotated[bool, Doc("Whether prompts reuse the blocks of earlier ones that begin alike.")] = True
    max_running: Annotated[int, Ge(1), Le(1 << 16), Doc("Most requests in one batch.")] = 64
    max_waiting: Annotated[Count, Doc("Most requests that wait for a place in the batch; more are refused (429).")] = (
        1024
    )
    max_step_tokens: Annotated[StepTokens, Doc("Most prompt tokens in a step in which no request decodes.")] = 1024
    max_step_tokens_decoding: Annotated[StepTokens, Doc("Most prompt tokens in a step while others decode.")] = 1024
    prefill_ratio: Annotated[
        float,
        Gt(0),
        Le(1000),
        Doc(
            "While others decode, prefill takes at most this many times as long as their decode step. "
            "This bounds how much later their next token comes."
        ),
    ] = 4.0
    image_cache_bytes: Annotated[
        Bytes, Doc("Memory for images that the vision tower has encoded, for requests that send them again.")
    ] = 256 << 20
    max_adapters: Annotated[Count, Doc("Most adapters loaded at a time; requests for more wait in a fair order.")] = 256
    max_adapter_rank: Annotated[Count, Doc("Highest rank of an adapter.")] = 64
    adapter_bytes: Annotated[Bytes, Doc("Memory for the weights of loaded adapters, on each device.")] = 4 << 30
    max_adapter_file_bytes: Annotated[Bytes, Doc("Largest weights file of an adapter.")] = 2 << 30
    adapter_loaders: Annotated[Count, Doc("Threads that read adapters.")] = 2
    adapter_load_timeout_s: Annotated[Seconds, Doc("Longest that a request waits for its adapter to load.")] = 60.0
    attention: Annotated[
        AttentionName,
        Doc(
            "Kernels: `native` (C, Llama-like models on a CPU), `triton` (CUDA), `varlen` and `flashinfer` "
            "(as `triton`, prefill by FlashAttention or that library), `sdpa` (torch, every model). "
            "`auto`: `native` or `triton` where possible, else `sdpa`."
        ),
    ] = "auto"
    cuda_graphs: Annotated[bool, Doc("On a CUDA device: record decode steps once and replay them.")] = True
    overlap: Annotated[
        bool, Doc("On a CUDA device: start a decode step before the tokens of the last one are on the host.")
    ] = True
    kernel_cache: Annotated[Text, Doc("Folder for compiled C kernels.")] = "~/.cache/roundhouse/kernels"
    exact: Annotated[
        bool,
        Doc(
            "Batch invariance: results are bit-equal in any batch and any chunks. Needs float32, "
            "and is slow without the C kernels."
        ),
    ] = False
    threads: Annotated[
        Annotated[int, Ge(1), Le(1024)] | None, Doc("CPU threads of each process; null: the cores that it may use.")
    ] = None
    tensor_parallel: Annotated[
        int, Ge(1), Le(64), Doc("Processes that share the model, one per device; follows `gpus_per_replica` above 1.")
    ] = 1
    self_test: Annotated[bool, Doc("Whether a new engine first compares itself with the model's plain forward.")] = True

    def __post_init__(self) -> None:
        for name, limit in _LIMITS:
            value = getattr(self, name)
            if value is not None and (complaint := _complaint(value, limit)):
                raise ValueError(f"{name} {complaint}, not {value!r}.")
        if self.exact and self.dtype not in ("float32", "auto"):
            raise ValueError(f"exact needs dtype float32, not {self.dtype!r}.")
        if self.tensor_parallel > 1 and (self.exact or self.attention == "native" or self.source.endswith(".gguf")):
            what = "exact" if self.exact else "attention 'native'" if self.attention == "native" else "a GGUF file"
            raise ValueError(f"tensor_parallel must be 1 with {what}, not {self.tensor_parallel!r}.")


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineOptions):
    """The options of one engine, and the device that it runs on."""

    device: str = "auto"


def limits_of(hint: Any) -> Iterator[BaseMetadata]:
    """The limits in an annotated type, those of the members of a union included."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        yield from limits_of(inner)
        yield from (note for note in notes if isinstance(note, BaseMetadata))
    else:
        for member in get_args(hint):
            yield from limits_of(member)


def _complaint(value: Any, limit: BaseMetadata) -> str | None:
    """What is wrong with a value. "not >=" rather than "<", because NaN fails every limit."""
    match limit:
        case Ge(least) if not value >= least:
            return f"must be at least {least}"
        case Gt(bound) if not value > bound:
            return f"must be greater than {bound}"
        case Le(most) if not value <= most:
            return f"must be at most {most}"
        case MultipleOf(unit) if value % unit:
            return f"must be a multiple of {unit}"
        case MinLen() if not value:
            return "must not be empty"
    return None


_LIMITS = tuple(
    (name, limit)
    for name, hint in get_type_hints(EngineOptions, include_extras=True).items()
    for limit in limits_of(hint)
)
