"""Checks that an operator cannot make, or not by name: what is no plain tensor, tensors on several
devices, derivatives that nobody computes."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

# The tensors that every attention call has, in the order in which they are checked.
ATTENTION_TENSORS = (
    "q",
    "k_cache",
    "block_table",
    "cache_seqlens",
    "tile_scheduler_metadata",
    "num_splits",
)


def require_tensor(name: str, given: object, wanted: str = "a torch.Tensor") -> None:
    """It is a tensor; else a TypeError says what it is and what is wanted."""
    if not isinstance(given, torch.Tensor):
        what = "None" if given is None else f"of type {type(given).__name__}"
        raise TypeError(f"{name} is {what}; it must be {wanted}") from None


def check_given(tensors: dict[str, torch.Tensor | None]) -> None:
    """None is missing where an operator takes a tensor, in the operators' words."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise RuntimeError(f"{name} is None; it must be a tensor") from None


def check_devices(tensors: dict[str, torch.Tensor]) -> None:
    """All are on the device of the first."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise RuntimeError(
                f"{name} is on {tensor.device}; all tensors must be on one device, that of the "
                f"first, {device}"
            ) from None


def check_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """All are tensors, dense ones, on the device of the first."""
    for name, tensor in tensors.items():
        require_tensor(name, tensor)
        if tensor.layout != torch.strided:
            raise RuntimeError(
                f"{name} has layout {tensor.layout}; it must be torch.strided"
            ) from None
        if tensor.is_nested or tensor.is_quantized:
            what = "nested" if tensor.is_nested else "quantized"
            raise RuntimeError(f"{name} is a {what} tensor; it must be a plain one") from None
    check_devices(tensors)


def check_int64(name: str, given: object) -> None:
    """An integer fits into what the operators take; of another type they speak themselves."""
    if isinstance(given, int) and not -(2**63) <= given < 2**63:
        raise RuntimeError(f"{name} is {given}; it must be an integer of 64 bits") from None


def check_no_gradients(function: str, tensors: dict[str, torch.Tensor]) -> None:
    """None asks for gradients, nor for the derivatives of forward mode."""
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not (backward or forward):
        return
    for name, tensor in tensors.items():
        if backward and tensor.requires_grad:
            raise RuntimeError(
                f"{name} requires gradients; {function} computes none: call it under "
                "torch.no_grad() or detach its inputs"
            ) from None
        if forward and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{name} has a tangent of forward-mode differentiation; {function} computes none: "
                "detach its inputs"
            ) from None
