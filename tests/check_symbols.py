"""Checks that code compiled for one instruction set cannot be called on every processor.

An inline function or a template that two objects define is kept once by the linker, whichever comes
first: if that is the copy of an object compiled with instruction-set flags, all callers get it. So
in every object whose command has such flags

- each weak symbol names the namespace of its source's folder (`::avx2::` for avx2/kernels.cpp),
  which no code outside of that folder does, and
- no other object defines it, since two sources of one folder may have different flags.

Usage: check_symbols.py BUILD_DIR [NM]; reads compile_commands.json there, prints one line a
violation and exits with 1 when there is any.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

INSTRUCTION_SET_FLAG = re.compile(r"-m(arch=|cpu=|avx|fma|f16c|sse|amx|bmi|sve)")
WEAK = set("WVu")  # nm: weak function, weak object, unique global


def library_objects(build: Path) -> dict[Path, tuple[str, bool]]:
    """For each of the library's objects: its source's folder, and whether flags were given."""
    objects = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        source = Path(entry["file"])
        command = shlex.split(entry["command"])
        path = Path(entry["directory"], command[command.index("-o") + 1])
        if "src" not in source.parts or path.relative_to(build).parts[0] == "tests":
            continue
        flagged = any(INSTRUCTION_SET_FLAG.match(word) for word in command)
        objects[path] = (source.parent.name, flagged)
    return objects


def weak_symbols(path: Path, nm: str) -> set[str]:
    """Demangled names of the symbols of which the linker keeps one copy."""
    lines = subprocess.run(
        [nm, "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = set()
    for line in lines:
        _, kind, name = line.split(maxsplit=2)
        # Which routine handles exceptions: a pointer, the same in every object.
        if kind in WEAK and not name.startswith("DW.ref."):
            found.add(name)
    return found


def violations(build: Path, nm: str = "nm") -> list[str]:
    """One line for each weak symbol that an instruction set's object could give to others."""
    objects = library_objects(build)
    symbols = {path: weak_symbols(path, nm) for path in objects}
    owners = defaultdict(list)
    for path, names in symbols.items():
        for name in names:
            owners[name].append(path)
    found = []
    for path, (folder, flagged) in sorted(objects.items()):
        if not flagged:
            continue
        for name in sorted(symbols[path]):
            where = f"{folder}/{path.name}: {name}"
            if f"::{folder}::" not in name:
                found.append(f"{where}: does not name {folder}")
            others = [other for other in owners[name] if other != path]
            if others:
                found.append(f"{where}: also in {', '.join(other.name for other in others)}")
    if not any(flagged for _, flagged in objects.values()):
        found.append(f"{build}: no object was compiled with flags of an instruction set")
    return found


def main(arguments: list[str]) -> int:
    """Prints the violations; 1 when there is any."""
    found = violations(Path(arguments[0]).resolve(), *arguments[1:2])
    print("\n".join(found) if found else "no symbol of an instruction set is shared")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
