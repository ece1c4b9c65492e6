"""The C library's functions and structures, as ctypes. The C sources say what they mean."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_void_p
from pathlib import Path
from typing import Any

import torch


class Settings(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "block_size")),
        *((name, c_int32) for name in ("max_tokens", "max_slots", "is_bf16", "threads")),
        ("eps", c_float),
        ("scale", c_float),
    )


class Step(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("rows", "fresh", "items", "rows_per_item", "max_len")),
        *((name, c_void_p) for name in ("span", "tables", "item", "kv_slots", "fresh_block", "slots")),
        *((name, c_void_p) for name in ("cos", "sin", "hidden")),
        *((name, c_int32) for name in ("deep_layers", "deep_count")),
        *((name, c_void_p) for name in ("deep_row", "deep")),
    )


class Library:
    """The functions, typed. Raises `OSError` when the file is not a library for this machine."""

    def __init__(self, path: Path) -> None:
        dll = ctypes.CDLL(str(path))
        self.new = _typed(dll.rh_new, c_void_p, POINTER(Settings))
        self.free = _typed(dll.rh_free, None, c_void_p)
        self.uses_amx = _typed(dll.rh_uses_amx, c_int)
        self.set_layer = _typed(dll.rh_set_layer, c_int, c_void_p, c_int, *[c_void_p] * 12, c_int)
        self.set_head = _typed(dll.rh_set_head, c_int, c_void_p, c_int, c_void_p, c_void_p, c_float)
        self.set_cache = _typed(dll.rh_set_cache, c_int, c_void_p, c_int)
        self.set_pair = _typed(dll.rh_set_pair, None, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_int, c_float)
        self.clear_slot = _typed(dll.rh_clear_slot, None, c_void_p, c_int)
        self.forward = _typed(dll.rh_forward, c_int, c_void_p, POINTER(Step))
        self.head = _typed(dll.rh_head, None, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p)


def _typed(function: Any, result: type | None, *arguments: type) -> Callable[..., Any]:
    function.restype = result
    function.argtypes = arguments
    typed: Callable[..., Any] = function
    return typed


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a contiguous tensor's data; the caller keeps the tensor alive."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
