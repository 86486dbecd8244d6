"""Checks that a shared library gives other code nothing but the C interface.

Whatever else it exported could take the place of the same name in another copy of the library in
one process, such as that of the torch operators, or be replaced by it.

Usage: check_exports.py LIBRARY [NM]; prints one line a symbol and exits with 1 when there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys

# Symbols as linkers know them. Demangled, some functions begin with their result, which any type
# may be.
EXPECTED = re.compile(
    r"flashmla_\w+"
    r"|_init|_fini|_edata|_end|__bss_start"  # what linkers define in every library
    r"|_Zn[wa][jm]Pv|_Zd[la]PvS_"  # new and delete in place
    # The standard library's templates, the same code in all, with their type information, static
    # variables and guards: std, as `St` or short for one of its types, and __gnu_cxx.
    r"|_Z(GV|GR|T[VTIS])?Z*(N[rVK]*[RO]?)?(S[tabsiod]|9__gnu_cxx)\w*"
)


def names_of(library: str, nm: str, *options: str) -> list[str]:
    """Exported names, in the order of the symbol table."""
    command = [nm, "-D", "--no-sort", "--defined-only", *options, library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def others(library: str, nm: str = "nm") -> list[str]:
    """Exported names that are not of the C interface, demangled."""
    names = names_of(library, nm)
    if "flashmla_decode" not in names:
        return [f"{library} does not export flashmla_decode"]
    readable = names_of(library, nm, "--demangle")
    pairs = zip(names, readable, strict=True)
    return sorted({shown for name, shown in pairs if not EXPECTED.fullmatch(name)})


def main(arguments: list[str]) -> int:
    """Prints the names; 1 when there is any."""
    found = others(*arguments)
    print("\n".join(found) if found else "the C interface is all that is exported")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
