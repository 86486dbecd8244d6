"""Checks the direction of includes, the rules of HACKING.md that a machine can check.

- include/ sees include/ alone.
- problem, kv, combine, select, schedule and tuning do not include backends, save the manifests
  (kernels.inc), which are data.
- A backend does not include another backend; reference, the definition of right, is not one of
  the siblings, and includes none of them.
- Rooms see only what stands to their left: problem does not include select, and so on.
- Nothing under src/ or include/ knows torch or Python.

Usage: check_includes.py [ROOT]; prints one line a violation and exits with 1 when there is any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCE_SUFFIXES = {".h", ".hpp", ".hxx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
FOREIGN = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|aten)(/|$)|^Python\.h$|^pyconfig\.h$")
CUDA = re.compile(r"^(cuda|cutlass|cute)(/|_|\.|$)|^(cuda|cutlass|cute)[^/]*\.h$")

# For each room under src/, the rooms that it may include besides itself.
ALLOWED = {
    "kv": set(),
    "tuning": set(),
    "problem": {"kv"},
    "combine": {"kv", "problem"},
    "select": {"kv", "problem", "tuning"},
    "schedule": {"kv", "problem", "tuning"},
}
# What any backend may include besides itself.
ALLOWED_TO_BACKENDS = {"kv", "problem", "combine", "select", "schedule", "tuning"}
BACKENDS = "backends"
REFERENCE = "reference"


def includes_of(path: Path) -> list[tuple[int, str]]:
    """(line number, included name) of each include directive."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(0)) + match.group(0).count("\n") + 1, match[1] or match[2])
        for match in INCLUDE.finditer(text)
    ]


def resolve(root: Path, path: Path, name: str) -> Path | None:
    """The project's file that an include names, relative to the root; None for other files."""
    for folder in (path.parent, root / "include", root / "src"):
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root)
    return None


def room_of(relative: Path) -> tuple[str, str]:
    """(room, backend) of a file: ("backends", "cpu"), ("problem", ""), ("include", "")."""
    parts = relative.parts
    if parts[0] == "include":
        return "include", ""
    if len(parts) < 3:
        return "", ""  # decode.cpp and c_api.cpp, which tie the rooms together
    return parts[1], parts[2] if parts[1] == BACKENDS else ""


def objection(source: Path, target: Path | None, name: str) -> str | None:
    """Why `source` must not include `target` (or the foreign file `name`), or None."""
    if FOREIGN.search(name):
        return "the core must not know torch or Python"
    room, backend = room_of(source)
    if room != BACKENDS and CUDA.search(name):
        return "CUDA belongs to backends/cuda"
    if target is None:
        return None
    if target.parts[0] not in {"include", "src"}:
        return f"{target} is outside the library"
    target_room, target_backend = room_of(target)
    if target_room == "include" or room == "":
        return None
    if room == "include":
        return "public headers must not include what is not installed"
    if target_room == room and target_backend == backend:
        return None
    if room == BACKENDS:
        if target_room == BACKENDS:
            if target_backend == REFERENCE:
                return None
            return f"backends/{backend} must not see backends/{target_backend}"
        if target_room in ALLOWED_TO_BACKENDS:
            return None
        return f"backends must not include {target}"
    if target_room == BACKENDS:
        if target.name == "kernels.inc" and room == "select":
            return None
        return f"{room} must not include backends"
    if room not in ALLOWED:
        return f"{room} is not a room of the house; list it in {Path(__file__).name}"
    if target_room not in ALLOWED[room]:
        return f"{room} must not include {target_room or target}"
    return None


def violations(root: Path) -> list[str]:
    """One line a violation under src/ and include/."""
    root = root.resolve()
    found = []
    for folder in ("include", "src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SOURCE_SUFFIXES or not path.is_file():
                continue
            relative = path.relative_to(root)
            for line, name in includes_of(path):
                target = resolve(root, path, name)
                reason = objection(relative, target, name)
                if reason is not None:
                    found.append(f'{relative}:{line}: includes "{name}": {reason}')
    return found


def main() -> int:
    """Entry of the command line."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    if not (root / "src").is_dir():
        print(f"{root} has no src/ folder", file=sys.stderr)
        return 2
    found = violations(root)
    print("\n".join(found) if found else "include directions: good")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
