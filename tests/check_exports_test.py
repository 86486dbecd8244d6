"""Links small libraries with and without leaks and sees the leaks reported.

Usage: check_exports_test.py [CXX [NM]]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from check_exports import others

CXX, NM = "c++", "nm"

DECODE = 'extern "C" __attribute__((visibility("default"))) int flashmla_decode() { return 0; }\n'
# Not optimised, calls of all of these stay, and with them functions of every kind of result.
STANDARD = """
#include <sstream>
#include <string>
#include <vector>
bool same(const std::string& a, const std::string& b) { return a == b + "x"; }
int sum(std::vector<int> v) { v.push_back(1); return v.front() + v.back(); }
std::string text(int n) { std::stringstream s; s << n; return std::to_string(n) + s.str(); }
"""


class CheckExports(unittest.TestCase):
    """The checker on libraries that keep the rule and on others."""

    def check(self, source: str, *flags: str) -> list[str]:
        """What a library of one source exports beside the C interface."""
        with tempfile.TemporaryDirectory() as name:
            library = Path(name) / "library.so"
            subprocess.run(
                [CXX, "-std=c++20", "-shared", "-fPIC", *flags, "-x", "c++", "-", "-o", library],
                input=source,
                text=True,
                check=True,
            )
            return others(str(library), NM)

    def test_the_standard_library(self) -> None:
        """Its templates are exported whatever is asked for, the fewer the more is inlined."""
        for optimisation in ("-O0", "-O2"):
            found = self.check(DECODE + STANDARD, "-fvisibility=hidden", optimisation)
            assert found == [], found

    def test_functions_of_the_project(self) -> None:
        """Functions that are not hidden, some of them with names and types of std in theirs."""
        leaks = """
        namespace flashmla { int plan(std::string) { return 0; } }
        bool operator==(const std::string&, int) { return true; }
        int Start;
        """
        assert self.check(DECODE + "#include <string>\n" + leaks, "-O2") == [
            "Start",
            f"flashmla::plan({STRING})",
            f"operator==({STRING} const&, int)",
        ]

    def test_without_the_interface(self) -> None:
        """A check of nothing does not pass."""
        found = self.check("int other;", "-fvisibility=hidden")
        assert len(found) == 1, found
        assert "does not export flashmla_decode" in found[0]


STRING = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"

if __name__ == "__main__":
    CXX, NM = (sys.argv[1:] + [CXX, NM][len(sys.argv) - 1 :])[:2]
    unittest.main(argv=sys.argv[:1])
