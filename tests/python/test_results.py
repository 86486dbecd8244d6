"""The committed results of a GPU as data, and the picture that is drawn of them."""

from __future__ import annotations

import csv
import importlib.util
import math
from pathlib import Path

import pytest

from flashmla.cli import bench_cuda

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def plot():
    spec = importlib.util.spec_from_file_location("plot", BENCH / "plot.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(name: str) -> list[dict[str, str]]:
    with (BENCH / "results" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_times_have_the_columns_that_are_read_as_a_diff():
    rows = rows_of("h200.csv")
    assert tuple(rows[0]) == bench_cuda.COLUMNS
    for row in rows:
        numbers = [
            value for value in bench_cuda.as_numbers(row).values() if isinstance(value, float)
        ]
        assert all(math.isfinite(number) for number in numbers)
        assert numbers
        assert row["commit"]
        assert row["date"]
    modes = {(row["workload"], row["mode"]) for row in rows}
    assert len(modes) == len(rows)
    assert modes >= {(workload, mode) for workload, _ in modes for mode in ("burst", "sustained")}


def test_every_workload_of_the_peers_is_timed():
    ours = {(row["workload"], row["mode"]) for row in rows_of("h200.csv")}
    assert {(row["workload"], row["mode"]) for row in rows_of("h200_peers.csv")} <= ours


def test_ratios_are_of_one_workload_and_mode(plot):
    times = [
        {"workload": "b", "mode": "burst", "us": "2"},
        {"workload": "a", "mode": "burst", "us": "4"},
        {"workload": "a", "mode": "sustained", "us": "8"},
        {"workload": "ceiling", "mode": "burst", "us": ""},
    ]
    peers = [
        {"workload": "a", "mode": "burst", "system": "x", "us": "6"},
        {"workload": "b", "mode": "burst", "system": "x", "us": "1"},
        {"workload": "a", "mode": "sustained", "system": "y", "us": "4"},
        {"workload": "c", "mode": "burst", "system": "x", "us": "1"},
    ]
    assert plot.ratios(times, peers, "burst") == {"b": {"x": 0.5}, "a": {"x": 1.5}}
    assert plot.ratios(times, peers, "sustained") == {"a": {"y": 0.5}}


def test_the_picture_shows_every_peer(plot, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.svg"
    peers = rows_of("h200_peers.csv")
    plot.draw(rows_of("h200.csv"), peers, out)
    text = out.read_text()
    for system in {row["system"] for row in peers}:
        assert system in text
    first = text
    plot.draw(rows_of("h200.csv"), peers, out)
    assert out.read_text() == first
