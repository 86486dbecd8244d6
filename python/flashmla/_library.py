"""The compiled library: where it is, whether it loads, and its C interface for questions.

Attention itself goes through torch operators; this module is for what no tensor is needed for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

LIBRARY_PATH = Path(__file__).parent / "_flashmla_torch.so"

_OK = 0
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
_DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}


class _KernelInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("instruction_set", ctypes.c_char_p),
        ("device_type", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("usable", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Kernel:
    """A kernel compiled into the library. `index` is what `torch.ops.flashmla.decode` forces."""

    index: int
    name: str
    instruction_set: str
    device_type: str
    dtype: torch.dtype
    usable: bool


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if not LIBRARY_PATH.exists():
        return None, (
            f"the compiled library {LIBRARY_PATH.name} is not in {LIBRARY_PATH.parent}; "
            "install the package with `pip install .` from its source, and do not import it from a "
            "source directory that hides the installed one"
        )
    try:
        torch.ops.load_library(str(LIBRARY_PATH))
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except (OSError, RuntimeError) as error:
        return None, f"the compiled library {LIBRARY_PATH} does not load: {error}"
    library.flashmla_last_error.restype = ctypes.c_char_p
    library.flashmla_version.restype = ctypes.c_char_p
    library.flashmla_cpu_features.restype = ctypes.c_char_p
    library.flashmla_torch_last_error.restype = ctypes.c_char_p
    library.flashmla_plan_num_parts.argtypes = [
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_int32),
    ]
    return library, None


_library, LOAD_ERROR = _load()


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        RuntimeError: it is not there or does not load; the message says why.
    """
    if _library is None:
        raise RuntimeError(f"flashmla cannot compute: {LOAD_ERROR}")
    return _library


def _last_error() -> str:
    return library().flashmla_last_error().decode()


def version() -> str:
    return library().flashmla_version().decode()


def cpu_features() -> str:
    """What this process may use of the processor, after `FLASHMLA_ISA`; "none" for the baseline."""
    return library().flashmla_cpu_features().decode()


def device_error(device: torch.device) -> str | None:
    """Why attention does not run on `device`, or None. Starts no CUDA context."""
    if device.type not in _DEVICE_TYPES:
        return f"the device is {device}; flashmla computes on cpu and cuda"
    status = library().flashmla_device_supported(_DEVICE_TYPES[device.type], device.index or 0)
    return None if status == _OK else _last_error()


def plan_num_parts(device: torch.device, num_heads_per_head_k: int, num_heads_k: int) -> int:
    """Rows of `tile_scheduler_metadata` that the planner makes on `device`."""
    parts = ctypes.c_int32()
    status = library().flashmla_plan_num_parts(
        _DEVICE_TYPES[device.type],
        device.index or 0,
        num_heads_per_head_k,
        num_heads_k,
        torch.get_num_threads(),
        ctypes.byref(parts),
    )
    if status != _OK:
        raise RuntimeError(_last_error())
    return parts.value


def kernels() -> list[Kernel]:
    """Every kernel compiled into the library, in order of preference."""
    found = []
    for index in range(library().flashmla_num_kernels()):
        info = _KernelInfo(struct_size=ctypes.sizeof(_KernelInfo))
        if library().flashmla_kernel_at(index, ctypes.byref(info)) != _OK:
            raise RuntimeError(_last_error())
        found.append(
            Kernel(
                index,
                info.name.decode(),
                info.instruction_set.decode(),
                "cpu" if info.device_type == 0 else "cuda",
                _DTYPES[info.dtype],
                bool(info.usable),
            )
        )
    return found


def _vllm_defines_the_names() -> bool:
    """Whether vLLM, imported or not, brings operators of the library name `_flashmla_C`."""
    if any(name.startswith("_flashmla_C::") for name in torch._C._dispatch_get_all_op_names()):
        return True
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        return False
    return any(
        any(Path(location).glob("_flashmla_C*.so")) for location in spec.submodule_search_locations
    )


def register_vllm_names() -> bool:
    """Also registers the two original operators as `torch.ops._flashmla_C`.

    Two packages that define one library abort the process of the second, so another owner is looked
    for first: in the dispatcher, and among vLLM's files, without importing it. The environment
    variable `FLASHMLA_REGISTER_VLLM_NAMES` decides instead when it is 0 or 1.

    Returns:
        Whether the names are registered by this package.
    """
    forced = os.environ.get("FLASHMLA_REGISTER_VLLM_NAMES", "")
    if forced not in ("", "0", "1"):
        raise RuntimeError(f"FLASHMLA_REGISTER_VLLM_NAMES is {forced!r}; it must be 0 or 1")
    if forced == "0" or (forced == "" and _vllm_defines_the_names()):
        return False
    if library().flashmla_torch_register_vllm_names() == _OK:
        return True
    if forced == "1":
        reason = library().flashmla_torch_last_error().decode()
        raise RuntimeError(f"cannot register torch.ops._flashmla_C: {reason}")
    return False
