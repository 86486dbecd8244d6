"""Compiles small sources with leaks and sees each of them reported.

Usage: check_symbols_test.py [CXX [NM]]
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from check_symbols import violations

CXX, NM = "c++", "nm"
FLAG = "-mavx2" if platform.machine() in ("x86_64", "AMD64") else "-march=armv8-a"

# Out of line wherever it is used: what an optimiser may do with any inline function.
SHARED = "[[gnu::noinline]] inline int shared(int x) { return x + 1; }\n"
OWN = "namespace flashmla::simd { struct Vector {}; }\n"
TEMPLATE = "template <class V> [[gnu::noinline]] int loop(int x) { return x + sizeof(V); }\n"

BASELINE = ("baseline.cpp", [], SHARED + "int baseline(int x) { return shared(x); }\n")
CLEAN = (
    "kernels.cpp",
    [FLAG],
    OWN + TEMPLATE + "int a(int x) { return loop<flashmla::simd::Vector>(x); }\n",
)


class CheckSymbols(unittest.TestCase):
    """The checker on objects that keep the rule and on others."""

    def check(self, *sources: tuple[str, list[str], str]) -> list[str]:
        """Violations of a build of sources (name, flags, text) in src/simd."""
        with tempfile.TemporaryDirectory() as name:
            build = Path(name)
            folder = build / "src" / "simd"
            folder.mkdir(parents=True)
            entries = []
            for file, flags, text in sources:
                source = folder / file
                source.write_text(text)
                command = [CXX, "-std=c++20", *flags, "-o", f"{file}.o", "-c", str(source)]
                subprocess.run(command, cwd=build, check=True)
                entry = {"directory": name, "command": " ".join(command), "file": str(source)}
                entries.append(entry)
            (build / "compile_commands.json").write_text(json.dumps(entries))
            return violations(build, NM)

    def test_own_symbols(self) -> None:
        """A template over the folder's own type is nobody else's."""
        assert self.check(BASELINE, CLEAN) == []

    def test_inline_function_shared_with_the_baseline(self) -> None:
        """Both rules report it."""
        leak = ("leak.cpp", [FLAG], SHARED + "int b(int x) { return shared(x); }\n")
        found = self.check(BASELINE, CLEAN, leak)
        assert [line.split(": ")[1:] for line in found] == [
            ["shared(int)", "does not name simd"],
            ["shared(int)", "also in baseline.cpp.o"],
        ], found

    def test_inline_function_that_only_programs_could_share(self) -> None:
        """A function that no other object of the library defines yet."""
        leak = ("leak.cpp", [FLAG], SHARED + "int b(int x) { return shared(x); }\n")
        found = self.check(CLEAN, leak)
        assert len(found) == 1, found
        assert "shared(int): does not name simd" in found[0]

    def test_template_shared_by_two_sources_of_a_folder(self) -> None:
        """Their flags may differ."""
        other = ("other.cpp", [FLAG], CLEAN[2].replace("int a", "int c"))
        found = self.check(CLEAN, other)
        assert len(found) == 2, found
        assert "also in other.cpp.o" in found[0]
        assert "also in kernels.cpp.o" in found[1]

    def test_no_object_with_flags(self) -> None:
        """A check of nothing does not pass."""
        found = self.check(BASELINE)
        assert len(found) == 1, found
        assert "no object" in found[0]


if __name__ == "__main__":
    CXX, NM = (sys.argv[1:] + [CXX, NM][len(sys.argv) - 1 :])[:2]
    unittest.main(argv=sys.argv[:1])
