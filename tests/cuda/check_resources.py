#!/usr/bin/env python3
"""Check, without a GPU, that no kernel spills registers or uses local memory.

Usage: check_resources.py OBJECT...

Reads the resource usage that the assembler recorded in the objects' machine code with
cuobjdump: the toolkit's, or the one in Triton's package.
Exit status 1: a kernel has a stack frame or local memory. 77: no cuobjdump was found.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

USAGE = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def find_cuobjdump() -> str | None:
    """Path of cuobjdump: on PATH, in the toolkit, or in an installed Triton."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found:
        return found
    for folder in map(Path, sys.path):
        candidate = folder / "triton/backends/nvidia/bin/cuobjdump"
        if candidate.exists():
            return str(candidate)
    return None


def main() -> int:
    """Print one line a kernel and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+")
    arguments = parser.parse_args()
    tool = find_cuobjdump()
    if tool is None:
        print("cuobjdump was not found; nothing was checked")
        return 77
    lines = ["registers,stack,local,kernel"]
    bad = 0
    objects = [path for item in arguments.objects for path in item.split(";")]
    for path in objects:
        # An object without device code makes the tool fail; that none has any is caught below.
        text = subprocess.run(
            [tool, "--dump-resource-usage", path], check=False, capture_output=True, text=True
        ).stdout
        for name, registers, stack, _, local in USAGE.findall(text):
            lines.append(f"{registers},{stack},{local},{name}")
            if int(stack) or int(local):
                bad += 1
                print(f"{name} uses {stack} bytes of stack and {local} of local memory")
    if len(lines) == 1:
        print("no kernel was found in the objects")
        return 1
    print("\n".join(lines))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
