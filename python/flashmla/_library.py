"""The compiled library: where it is, whether it loads, and its C interface for questions.

Attention itself goes through torch operators; this module is for what no tensor is needed for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
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


class Tensor(ctypes.Structure):
    """flashmla_tensor of the C interface."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MAX_RANK),
        ("strides", ctypes.c_int64 * _MAX_RANK),
        ("size_bytes", ctypes.c_uint64),
    ]

    @classmethod
    def at(cls, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        """Sizes past the most dimensions that a call takes are left out: the rank is refused."""
        view = cls(data=address, dtype=dtype, rank=len(shape))
        dims = min(len(shape), _MAX_RANK)
        view.shape[:dims], view.strides[:dims] = shape[:dims], strides[:dims]
        return view

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Tensor:
        """A tensor of a dtype that calls take."""
        dtype = _DTYPE_CODES[tensor.dtype]
        return cls.at(tensor.data_ptr(), dtype, tensor.shape, tensor.stride())


class PlanArgs(ctypes.Structure):
    """flashmla_plan_args of the C interface."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("cache_seqlens", Tensor),
        ("num_heads_per_head_k", ctypes.c_int64),
        ("num_heads_k", ctypes.c_int64),
        ("tile_scheduler_metadata", Tensor),
        ("num_splits", Tensor),
        ("stream", ctypes.c_void_p),
    ]


class MergeArgs(ctypes.Structure):
    """flashmla_merge_args of the C interface."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("outs", Tensor),
        ("lses", Tensor),
        ("out", Tensor),
        ("lse", Tensor),
        ("stream", ctypes.c_void_p),
    ]


class DecodeArgs(ctypes.Structure):
    """flashmla_decode_args of the C interface."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("q", Tensor),
        ("k_cache", Tensor),
        ("block_table", Tensor),
        ("cache_seqlens", Tensor),
        ("visible_lens", Tensor),
        ("tile_scheduler_metadata", Tensor),
        ("num_splits", Tensor),
        ("out", Tensor),
        ("softmax_lse", Tensor),
        ("head_dim_v", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
        ("has_softmax_scale", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("kernel", ctypes.c_char_p),
        ("stream", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("allocate_context", ctypes.c_void_p),
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
    for call in ("plan", "decode", "merge"):
        getattr(library, f"flashmla_torch_{call}_refusal").restype = ctypes.c_char_p
    library.flashmla_torch_decode_refusal.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library, None


_library, LOAD_ERROR = _load()
NAMES_ERROR: str | None = None  # what register_vllm_names could not do


def why_unavailable() -> str | None:
    """Why nothing can be computed, on any device; None: it can."""
    return LOAD_ERROR or NAMES_ERROR


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        RuntimeError: it is not there or does not load, or the environment asks for what cannot be;
            the message says why.
    """
    if _library is None or NAMES_ERROR is not None:
        raise RuntimeError(f"flashmla cannot compute: {why_unavailable()}")
    return _library


def _last_error() -> str:
    return library().flashmla_last_error().decode()


def version() -> str:
    """The version of the compiled library, "major.minor.patch"."""
    return (_library or library()).flashmla_version().decode()


def cpu_features() -> str:
    """What this process may use of the processor, after `FLASHMLA_ISA`; "none" for the baseline."""
    return library().flashmla_cpu_features().decode()


def torch_dtype_number(dtype: torch.dtype) -> int:
    """torch's number of a dtype, as its C interface tells it; -1 where it does not."""
    name = str(dtype).removeprefix("torch.")
    number = getattr(library(), f"aoti_torch_dtype_{name}", None)
    return -1 if number is None else number()


def device_numbers(device: torch.device) -> tuple[int, int]:
    """Type and index of a device, as the C interface counts them.

    Raises:
        RuntimeError: flashmla knows no such type of device.
    """
    if device.type not in _DEVICE_TYPES:
        raise RuntimeError(f"the device is {device}; flashmla computes on cpu and cuda")
    return _DEVICE_TYPES[device.type], device.index or 0


def device_error(device: torch.device) -> str | None:
    """Why attention does not run on `device`, or None. Starts no CUDA context."""
    try:
        numbers = device_numbers(device)
    except RuntimeError as error:
        return str(error)
    status = library().flashmla_device_supported(*numbers)
    return None if status == _OK else _last_error()


def plan_num_parts(device: torch.device, num_heads_per_head_k: int, num_heads_k: int) -> int:
    """Rows of `tile_scheduler_metadata` that the planner makes on `device`."""
    parts = ctypes.c_int32()
    status = library().flashmla_plan_num_parts(
        *device_numbers(device),
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
    device_type, device_index = device_numbers(q.device)
    args = DecodeArgs(
        struct_size=ctypes.sizeof(DecodeArgs),
        device_type=device_type,
        device_index=device_index,
        head_dim_v=head_dim_v,
        kernel=None if kernel is None else kernel.encode(),
        **{name: Tensor.of(tensor) for name, tensor in tensors.items()},
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
        Whether the names are registered by this package. Where the variable holds what cannot be
        done, NAMES_ERROR says so: an import that fails could not be told from the command line.
    """
    global NAMES_ERROR
    forced = os.environ.get("FLASHMLA_REGISTER_VLLM_NAMES", "")
    NAMES_ERROR = None
    if forced not in ("", "0", "1"):
        NAMES_ERROR = f"FLASHMLA_REGISTER_VLLM_NAMES is {forced!r}; it must be 0 or 1"
        return False
    if library().flashmla_torch_has_vllm_names():  # this module, or the package, is loaded again
        return True
    if forced == "0" or (forced == "" and _vllm_defines_the_names()):
        return False
    try:
        names = torch.library.Library("_flashmla_C", "DEF")
    except RuntimeError:  # a library that was defined has no operators yet to be found by
        if forced == "1":
            NAMES_ERROR = (
                "cannot register torch.ops._flashmla_C: another package defines that library, and "
                "FLASHMLA_REGISTER_VLLM_NAMES is 1; unset it to leave the names to that package"
            )
        return False
    torch.ops.flashmla._vllm_names = names  # the definition lasts as long as this does
    library().flashmla_torch_register_vllm_names()
    return True
