#!/usr/bin/env python3
"""Draw bench/results: our times beside the peers' on one kind of GPU.

Usage: plot.py [--times FILE] [--peers FILE] [--out FILE]

Each line of the picture is a workload; a mark is a system's time divided by ours, so that marks
right of 1 are slower than flashmla. Columns of the files: workload, mode, us and, of the peers,
system.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = ("sustained", "burst")
MARKS = {"FlashMLA": "o", "FA3": "s", "FlashInfer fa3": "^", "TileLang": "D"}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ratios(
    times: Iterable[dict[str, str]], peers: Iterable[dict[str, str]], mode: str
) -> dict[str, dict[str, float]]:
    """By workload, in the order of the times, and system: its time divided by ours."""
    ours = {row["workload"]: float(row["us"]) for row in times if row["mode"] == mode and row["us"]}
    found: dict[str, dict[str, float]] = {}
    for row in peers:
        if row["mode"] == mode and row["workload"] in ours:
            ratio = float(row["us"]) / ours[row["workload"]]
            found.setdefault(row["workload"], {})[row["system"]] = ratio
    return {name: found[name] for name in ours if name in found}


def draw(times: list[dict[str, str]], peers: list[dict[str, str]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "flashmla"}
    from matplotlib import pyplot

    by_mode = {mode: ratios(times, peers, mode) for mode in MODES}
    names = [name for name in by_mode[MODES[0]] if not name.startswith("plan ")]
    figure, panels = pyplot.subplots(
        1, len(MODES), sharey=True, figsize=(9, 0.9 + 0.28 * len(names)), layout="constrained"
    )
    for panel, mode in zip(panels, MODES, strict=True):
        panel.axvline(1.0, color="black", linewidth=1)
        for system, mark in MARKS.items():
            points = [
                (by_mode[mode][name][system], place)
                for place, name in enumerate(names)
                if system in by_mode[mode].get(name, {})
            ]
            panel.plot(*zip(*points, strict=True), mark, label=system, markersize=5, alpha=0.85)
        panel.set_title(mode, fontsize=10)
        panel.set_xlabel("time / flashmla's time (right of the line: slower)")
        panel.grid(axis="y", linewidth=0.4, alpha=0.5)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=8, loc="best")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    """Entry of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = ROOT / "bench/results"
    parser.add_argument("--times", type=Path, default=results / "h200.csv")
    parser.add_argument("--peers", type=Path, default=results / "h200_peers.csv")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance/h200.svg")
    arguments = parser.parse_args()
    draw(read(arguments.times), read(arguments.peers), arguments.out)


if __name__ == "__main__":
    main()
