"""Settings and fixtures of the Python tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import flashmla
from flashmla import _library

settings.register_profile(
    "default",
    deadline=None,
    max_examples=40,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")

KERNELS = [k for k in _library.kernels() if k.usable and k.device_type == "cpu"]
BF16_KERNELS = [
    kernel
    for kernel in KERNELS
    # The reference is exact and slow; the C++ tests and `flashmla check` run it.
    if kernel.dtype == torch.bfloat16 and kernel.instruction_set != "reference"
]


@pytest.fixture(params=[*BF16_KERNELS, "cuda"], ids=lambda kernel: getattr(kernel, "name", kernel))
def kernel(request) -> _library.Kernel | str:
    """What computes bfloat16: each kernel of this CPU, to be forced, and the CUDA device."""
    if request.param == "cuda":
        supported, reason = flashmla.is_flashmla_supported("cuda")
        if not supported:
            pytest.skip(f"no CUDA device: {reason}")
    return request.param


@pytest.fixture(autouse=True)
def _two_threads():
    """The same pool everywhere, whatever a test sets it to."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(2)
