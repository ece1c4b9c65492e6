"""What an engine's configuration refuses."""

from typing import Any, get_type_hints

import pytest

from engines.interface.config import EngineConfig, EngineOptions, limits_of

COUNTS = (
    "context_length",
    "kv_cache_bytes",
    "max_running",
    "max_waiting",
    "max_step_tokens",
    "max_step_tokens_decoding",
    "image_cache_bytes",
    "max_adapters",
    "max_adapter_rank",
    "adapter_bytes",
    "max_adapter_file_bytes",
    "adapter_loaders",
    "threads",
    "tensor_parallel",
)
BAD: dict[str, tuple[Any, str]] = {
    **{name: (0, f"{name} must be at least 1, not 0.") for name in COUNTS},
    **{
        name: (0, f"{name} must be greater than 0, not 0.")
        for name in ("prefill_ratio", "memory_fraction", "adapter_load_timeout_s")
    },
    "block_size": (24, "block_size must be a multiple of 16, not 24."),
    "source": ("", "source must not be empty, not ''."),
    "kernel_cache": ("", "kernel_cache must not be empty, not ''."),
}


def test_every_option_with_a_range_is_tried_here() -> None:
    limited = {name for name, hint in get_type_hints(EngineOptions, include_extras=True).items() if [*limits_of(hint)]}
    assert limited == BAD.keys() | {"revision"}


@pytest.mark.parametrize(("name", "bad"), BAD.items(), ids=BAD)
def test_a_bad_value_is_refused_with_field_limit_and_value(name: str, bad: tuple[Any, str]) -> None:
    value, message = bad
    with pytest.raises(ValueError, match=r".") as refusal:
        EngineConfig(**{"source": "somewhere", name: value})
    assert str(refusal.value) == message


def test_a_block_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be"):
        EngineConfig(source="somewhere", block_size=0)


@pytest.mark.parametrize("name", ["prefill_ratio", "memory_fraction", "adapter_load_timeout_s"])
def test_what_is_not_a_number_is_within_no_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be greater than 0, not nan"):
        EngineConfig(**{"source": "somewhere", name: float("nan")})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_needs_float32(dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"exact needs dtype float32, not '{dtype}'"):
        EngineConfig(source="somewhere", exact=True, dtype=dtype)


def test_values_within_their_limits_are_taken_as_they_are() -> None:
    config = EngineConfig(source="somewhere", exact=True, dtype="float32", memory_fraction=1.0, block_size=32)
    assert (config.exact, config.block_size) == (True, 32)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("max_step_tokens", 1 << 20),
        ("max_step_tokens_decoding", 1 << 20),
        ("max_running", 1 << 16),
        ("threads", 1024),
        ("memory_fraction", 1),
    ],
)
def test_what_sizes_buffers_has_a_limit(name: str, most: int) -> None:
    EngineConfig(**{"source": "somewhere", name: most})
    with pytest.raises(ValueError, match=f"^{name} must be at most {most}, not {most + 1}.$"):
        EngineConfig(**{"source": "somewhere", name: most + 1})
