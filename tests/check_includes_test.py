"""Plants violations in a small tree and sees each of them reported."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from check_includes import violations

# A tree that keeps the rules.
GOOD = {
    "include/flashmla/types.hpp": "#include <cstdint>\n",
    "src/kv/dense.hpp": '#include "flashmla/types.hpp"\n',
    "src/problem/problem.hpp": '#include "kv/dense.hpp"\n',
    "src/select/select.cpp": '#include "backends/cpu/kernels.inc"\n',
    "src/schedule/planner.hpp": '#include "problem/problem.hpp"\n',
    "src/backends/cpu/kernels.inc": "",
    "src/backends/cpu/kernel.hpp": '#include "problem/problem.hpp"\n',
    "src/backends/cpu/avx2/kernels.cpp": '#include "backends/cpu/kernel.hpp"\n',
    "src/backends/cpu/reference_kernels.cpp": '#include "backends/reference/attention.hpp"\n',
    "src/backends/reference/attention.hpp": '#include "kv/dense.hpp"\n',
    "src/backends/cuda/launch.hpp": "#include <cuda_runtime.h>\n",
    "src/decode.cpp": '#include "backends/cpu/kernel.hpp"\n#include "select/select.cpp"\n',
}

# (file, its include, a word of the report)
PLANTED = [
    ("src/problem/problem.hpp", '"backends/cpu/kernel.hpp"', "problem must not include backends"),
    ("src/select/select.cpp", '"backends/cpu/kernel.hpp"', "select must not include backends"),
    ("src/schedule/planner.hpp", '"backends/cpu/kernels.inc"', "schedule must not"),
    ("src/schedule/planner.hpp", '"select/select.cpp"', "schedule must not include select"),
    ("src/schedule/planner.hpp", '"../backends/cpu/kernel.hpp"', "schedule must not"),
    ("src/problem/problem.hpp", '"schedule/planner.hpp"', "problem must not include schedule"),
    ("src/kv/dense.hpp", '"problem/problem.hpp"', "kv must not include problem"),
    ("src/backends/cuda/launch.hpp", '"backends/cpu/kernel.hpp"', "must not see backends/cpu"),
    ("src/backends/reference/attention.hpp", '"backends/cpu/kernel.hpp"', "must not see"),
    ("src/backends/cpu/kernel.hpp", '"decode.cpp"', "backends must not include"),
    ("src/backends/cpu/kernel.hpp", "<torch/extension.h>", "torch"),
    ("src/decode.cpp", "<ATen/ATen.h>", "torch"),
    ("include/flashmla/types.hpp", "<Python.h>", "Python"),
    ("include/flashmla/types.hpp", '"problem/problem.hpp"', "public headers"),
    ("include/flashmla/types.hpp", "<cuda_runtime.h>", "CUDA belongs"),
    ("src/problem/problem.hpp", "<cutlass/cutlass.h>", "CUDA belongs"),
    ("src/attic/old.hpp", '"problem/problem.hpp"', "not a room"),
]


class CheckIncludes(unittest.TestCase):
    """The checker on good and on spoilt trees."""

    def setUp(self) -> None:
        """Writes the good tree."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, text in GOOD.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def test_good_tree(self) -> None:
        """Nothing is reported."""
        assert violations(self.root) == []

    def test_planted_violations(self) -> None:
        """Each is reported with its file and line, and nothing else is."""
        for name, included, word in PLANTED:
            with self.subTest(file=name, include=included):
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                before = path.read_text() if path.exists() else None
                path.write_text(f"// a comment\n\n  #  include {included}\n")
                found = violations(self.root)
                assert len(found) == 1, found
                assert f"{name}:3: " in found[0]
                assert word in found[0]
                if before is None:
                    path.unlink()
                else:
                    path.write_text(before)


if __name__ == "__main__":
    unittest.main()
