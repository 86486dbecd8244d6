"""Checks that a shared library gives other code nothing but the C interface.

Whatever else it exported could take the place of the same name in another copy of the library in
one process, such as that of the torch operators, or be replaced by it.

Usage: check_exports.py LIBRARY [NM]; prints one line a symbol and exits with 1 when there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys

# What linkers define in every library, and the standard library's templates: the same code in all.
EXPECTED = re.compile(r"(flashmla_\w+|_init|_fini|_edata|_end|__bss_start|(void )?std::.*)")


def others(library: str, nm: str = "nm") -> list[str]:
    """Exported names that are not of the C interface."""
    lines = subprocess.run(
        [nm, "-DC", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = {line.split(maxsplit=2)[2] for line in lines}
    if "flashmla_decode" not in names:
        return [f"{library} does not export flashmla_decode"]
    return sorted(name for name in names if not EXPECTED.fullmatch(name))


def main(arguments: list[str]) -> int:
    """Prints the names; 1 when there is any."""
    found = others(*arguments)
    print("\n".join(found) if found else "the C interface is all that is exported")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
