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

import flashmla


def _path_of(name: str) -> Path:
    """A compiled file of the package. An editable installation has a folder of its own for them."""
    beside = Path(__file__).parent / name
    found = (Path(folder) / name for folder in flashmla.__path__)
    return beside if beside.exists() else next(filter(Path.exists, found), beside)


LIBRARY_PATH = _path_of("_flashmla_torch.so")

_OK = 0
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
_DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()} | {torch.int32: 4}
_MAX_RANK = 5


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MAX_RANK),
        ("strides", ctypes.c_int64 * _MAX_RANK),
        ("size_bytes", ctypes.c_uint64),
    ]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        view = cls(data=tensor.data_ptr(), dtype=_DTYPE_CODES[tensor.dtype], rank=tensor.dim())
        view.shape[: tensor.dim()] = tensor.shape
        view.strides[: tensor.dim()] = tensor.stride()
        return view


class _DecodeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("q", _Tensor),
        ("k_cache", _Tensor),
        ("block_table", _Tensor),
        ("cache_seqlens", _Tensor),
        ("visible_lens", _Tensor),
        ("tile_scheduler_metadata", _Tensor),
        ("num_splits", _Tensor),
        ("out", _Tensor),
        ("softmax_lse", _Tensor),
        ("head_dim_v", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
        ("has_softmax_scale", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("kernel", ctypes.c_char_p),
        ("stream", ctypes.c_void_p),
    ]


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
    library.flashmla_torch_register_vllm_names.restype = None
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
# The definition of torch's library `_flashmla_C`: it lasts as long as this does.
_vllm_names: torch.library.Library | None = None


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
    """The version of the compiled library, "major.minor.patch"."""
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


def explain_selection(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    kernel: str | None = None,
) -> tuple[str, dict[str, str]]:
    """The kernel that the library would use, and the reason of each that declines before it.

    Takes those arguments of `flash_mla_with_kvcache` that decide, with shapes as documented there;
    `kernel` forces one.

    Raises:
        RuntimeError: a wrong argument, no kernel computes the call, or the forced one declines.
    """
    batch, seq_len_q, num_heads_q, _ = q.shape
    # At least 1: too few heads are refused with the call, in its own terms.
    heads = max(1, seq_len_q * num_heads_q // k_cache.shape[2])
    plan = torch.ops.flashmla.get_mla_metadata(cache_seqlens, heads, k_cache.shape[2])
    tensors = {
        "q": q,
        "k_cache": k_cache,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        "tile_scheduler_metadata": plan[0],
        "num_splits": plan[1],
        "out": q.new_empty((batch, seq_len_q, num_heads_q, head_dim_v)),
        "softmax_lse": q.new_empty((batch, num_heads_q, seq_len_q), dtype=torch.float32),
    }
    args = _DecodeArgs(
        struct_size=ctypes.sizeof(_DecodeArgs),
        device_type=_DEVICE_TYPES[q.device.type],
        device_index=q.device.index or 0,
        head_dim_v=head_dim_v,
        kernel=None if kernel is None else kernel.encode(),
        **{name: _Tensor.of(tensor) for name, tensor in tensors.items()},
    )
    chosen, report = ctypes.c_char_p(), ctypes.c_char_p()
    status = library().flashmla_explain_selection(
        ctypes.byref(args), ctypes.byref(chosen), ctypes.byref(report)
    )
    if status != _OK:
        raise RuntimeError(_last_error())
    lines = (line.split(": ", 1) for line in report.value.decode().splitlines())
    return chosen.value.decode(), dict(lines)


def _vllm_defines_the_names() -> bool:
    """Whether vLLM, imported or not, brings operators of the library name `_flashmla_C`."""
    if any(name.startswith("_flashmla_C::") for name in torch._C._dispatch_get_all_op_names()):
        return True
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a stand-in that some test put into sys.modules: it has no files
        return False
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
    global _vllm_names
    forced = os.environ.get("FLASHMLA_REGISTER_VLLM_NAMES", "")
    if forced not in ("", "0", "1"):
        raise RuntimeError(f"FLASHMLA_REGISTER_VLLM_NAMES is {forced!r}; it must be 0 or 1")
    if forced == "0" or (forced == "" and _vllm_defines_the_names()):
        return False
    try:
        _vllm_names = torch.library.Library("_flashmla_C", "DEF")
    except RuntimeError:  # a library that was defined has no operators yet to be found by
        if forced == "":
            return False
        raise RuntimeError(
            "cannot register torch.ops._flashmla_C: another package defines that library, and "
            "FLASHMLA_REGISTER_VLLM_NAMES is 1; unset it to leave the names to that package"
        ) from None
    library().flashmla_torch_register_vllm_names()
    return True
