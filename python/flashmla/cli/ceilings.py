"""What this machine can do at most: rates of reading memory and of multiplying, measured."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flashmla import _library

LIBRARY_PATH = Path(_library.LIBRARY_PATH).with_name("_flashmla_ceilings.so")
BURST_MICROSECONDS = 300.0


class Ceilings:
    """Rates of `threads` threads together, for one dtype and the instruction sets allowed here.

    Loops over registers and plain loads where the package has them for this processor, else torch's
    own sum of a tensor and product of two float32 matrices.
    """

    def __init__(self, dtype: torch.dtype, threads: int):
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        self.library = ctypes.CDLL(str(LIBRARY_PATH)) if LIBRARY_PATH.exists() else None
        features = _library.cpu_features().split()
        if self.library is None:
            self.unit = "torch matmul"
        elif "AMX_BF16" in features and dtype == torch.bfloat16:
            self.unit = "amx_bf16"
        elif "AVX512" in features:
            self.unit = "avx512_fma"
        elif "AVX2" in features:
            self.unit = "avx2_fma"
        else:
            self.unit = "torch matmul"
        self.matrix = torch.randn(1024, 1024)

    def close(self) -> None:
        self.pool.shutdown()

    def _sum(self, rate_of_one: Callable[[int], float]) -> float:
        return sum(self.pool.map(rate_of_one, range(self.threads)))

    def compute_gflops(self) -> float:
        """One short measurement of the multiply-add rate."""
        if self.unit == "torch matmul":
            start = time.perf_counter()
            self.matrix @ self.matrix
            return 2 * self.matrix.shape[0] ** 3 / (time.perf_counter() - start) * 1e-9
        measure = getattr(self.library, f"flashmla_ceiling_{self.unit}")
        measure.argtypes, measure.restype = [ctypes.c_double], ctypes.c_double
        return self._sum(lambda _: measure(BURST_MICROSECONDS))

    def read_gbs(self, memory: torch.Tensor) -> float:
        """One pass over contiguous memory, which should be in no cache."""
        if self.library is None:
            start = time.perf_counter()
            memory.view(torch.int16).sum()
            return memory.nbytes / (time.perf_counter() - start) * 1e-9
        measure = self.library.flashmla_ceiling_read
        measure.argtypes, measure.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_double
        share = memory.nbytes // self.threads
        return self._sum(lambda i: measure(memory.data_ptr() + i * share, share))
