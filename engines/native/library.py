"""The C library's functions and structures, as ctypes. The C sources say what they mean."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_void_p
from pathlib import Path

import torch

_Function = ctypes._CFuncPtr


class Settings(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "block_size")),
        *((name, c_int32) for name in ("max_tokens", "max_slots", "is_bf16", "threads")),
        ("eps", c_float),
        ("scale", c_float),
    )


class Step(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("rows", "spans", "fresh", "items", "rows_per_item", "max_len")),
        *((name, c_void_p) for name in ("span", "tables", "item", "kv_slots", "fresh_block", "slots")),
        *((name, c_void_p) for name in ("cos", "sin", "hidden")),
    )


class Library:
    """The functions, typed. Raises `OSError` when the file is not a library for this machine."""

    def __init__(self, path: Path) -> None:
        dll = ctypes.CDLL(str(path))
        self.new = _function(dll.rh_new, c_void_p, POINTER(Settings))
        self.free = _function(dll.rh_free, None, c_void_p)
        self.uses_amx = _function(dll.rh_uses_amx, c_int)
        self.set_layer = _function(dll.rh_set_layer, None, c_void_p, c_int, *[c_void_p] * 12, c_int)
        self.set_head = _function(dll.rh_set_head, None, c_void_p, c_int, c_void_p)
        self.set_cache = _function(dll.rh_set_cache, c_int, c_void_p, c_int)
        self.set_pair = _function(
            dll.rh_set_pair, None, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_int, c_float
        )
        self.clear_slot = _function(dll.rh_clear_slot, None, c_void_p, c_int)
        self.forward = _function(dll.rh_forward, c_int, c_void_p, POINTER(Step))
        self.head = _function(dll.rh_head, None, c_void_p, c_void_p, c_int, c_void_p, c_void_p)


def _function(function: _Function, result: type | None, *arguments: type) -> _Function:
    function.restype = result
    function.argtypes = arguments
    return function


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a contiguous tensor's data; the caller keeps the tensor alive."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
