"""Settings and fixtures of the Python tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import flashmla
from flashmla import _library

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    # A machine lent for its GPU may have pytest and no more; what is left out is said.
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if "from hypothesis import" in path.read_text()
    ]
else:
    collect_ignore = []
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


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: computes on a CUDA device")


def pytest_report_header():
    if collect_ignore:
        return f"hypothesis is not installed; left out: {', '.join(sorted(collect_ignore))}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and "cuda" in parameters.params.values():
            item.add_marker("gpu")


def _or_skip(parameter):
    if parameter == "cuda":
        supported, reason = flashmla.is_flashmla_supported("cuda")
        if not supported:
            pytest.skip(f"no CUDA device: {reason}")
    return parameter


@pytest.fixture(params=[*BF16_KERNELS, "cuda"], ids=lambda kernel: getattr(kernel, "name", kernel))
def kernel(request) -> _library.Kernel | str:
    """What computes bfloat16: each kernel of this CPU, to be forced, and the CUDA device."""
    return _or_skip(request.param)


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    """Each device, by the library's own choice of kernel."""
    return _or_skip(request.param)


@pytest.fixture(params=["cuda"])
def gpu(request) -> torch.device:
    """The CUDA device, for what other devices do not have."""
    return torch.device(_or_skip(request.param))


@pytest.fixture(autouse=True)
def _two_threads():
    """The same pool everywhere, whatever a test sets it to."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(2)
