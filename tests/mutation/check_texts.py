"""Checks that the text of each mutation stands in its source exactly once, as run.py needs it.

Usage: check_texts.py [ROOT]; prints one line a mistake and exits with 1 when there is any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from mutations import MUTATIONS, Mutation


def mistakes(root: Path, mutations: Iterable[Mutation]) -> list[str]:
    """What keeps mutations from being planted under root."""
    found = []
    for mutation in mutations:
        path = root / "src" / mutation.file
        count = path.read_text(encoding="utf-8").count(mutation.old) if path.exists() else 0
        if count != 1:
            found.append(f"src/{mutation.file} has {count} times: {mutation.old}")
        elif mutation.new == mutation.old:
            found.append(f"src/{mutation.file} would not change: {mutation.old}")
    return found


def main(root: Path) -> int:
    """Prints the mistakes; 1 when there are any."""
    found = mistakes(root, MUTATIONS)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]))
