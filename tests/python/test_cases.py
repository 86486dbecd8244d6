"""The case list as data: its names, its fields, and inputs made from it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from flashmla import cases

FILES = ["dense", "edge", "perf"]
SOURCE = Path(__file__).parents[2] / "cases"


def test_names_are_unique_over_all_files():
    names = [case.name for file in FILES for case in cases.load(file)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("file", FILES)
def test_the_package_carries_the_files_of_the_source(file):
    rows = json.loads((SOURCE / f"{file}.json").read_text())
    assert [row["name"] for row in rows] == [case.name for case in cases.load(file)]


def test_the_readme_documents_every_field():
    documented = set(
        re.findall(
            r"`(\w+)`",
            "".join(
                line.split("|")[1]
                for line in (SOURCE / "README.md").read_text().splitlines()
                if line.startswith("|")
            ),
        )
    )
    assert {field.name for field in dataclasses.fields(cases.Case)} == documented


@pytest.mark.parametrize("file", ["dense", "edge"])
def test_inputs_are_poisoned_and_nothing_owned_is(file):
    for case in cases.load(file):
        inputs = cases.make_inputs(case, torch.bfloat16)
        again = cases.make_inputs(case, torch.bfloat16)
        assert torch.equal(inputs.q, again.q)
        assert torch.equal(inputs.block_table, again.block_table)
        owned = torch.zeros(inputs.k_cache.shape[:2], dtype=torch.bool)
        for row, length in enumerate(case.lens):
            tokens = torch.arange(length)
            blocks = inputs.block_table[row, tokens // case.page].long()
            assert not owned[blocks, tokens % case.page].any(), "a slot has two owners"
            owned[blocks, tokens % case.page] = True
        assert inputs.k_cache[owned].isfinite().all()
        assert inputs.k_cache[~owned].isnan().all()
        assert (~owned).any()


def test_the_list_covers_what_is_promised():
    every = [case for file in ("dense", "edge") for case in cases.load(file)]
    pairs = {(case.head_dim, case.head_dim_v) for case in every}
    assert pairs >= {
        (576, 512),
        (512, 512),
        (320, 256),
        (288, 256),
        (192, 128),
        (128, 128),
        (96, 64),
        (64, 64),
    }
    assert {case.heads for case in every} >= {1, 3, 20, 63, 128}
    assert {case.kv_heads for case in every} >= {1, 2, 3, 8}
    assert {case.page for case in every} >= {1, 16, 32, 64, 128, 784}
    assert {case.causal for case in every} == {True, False}
    assert any(case.visible for case in every)
    assert any(0 in case.lens for case in every)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_hand_written_plans_walk_every_block_once(parts):
    for case in cases.load("dense") + cases.load("edge"):
        inputs = cases.make_inputs(dataclasses.replace(case, head_dim=8), torch.bfloat16)
        metadata, num_splits = cases.plan_of(inputs, parts)
        assert metadata.shape == (parts, 8)
        walked = [0] * len(case.lens)
        shares = [0] * len(case.lens)
        for begin_row, begin_block, end_row, end_block, split, *_ in metadata.tolist():
            if begin_row < 0:
                continue
            assert split == shares[begin_row]
            for row in range(begin_row, end_row + 1):
                first = begin_block if row == begin_row else 0
                end = end_block if row == end_row else -(-case.lens[row] // 64)
                assert first == walked[row]
                walked[row] = end
                shares[row] += 1
        assert walked == [-(-length // 64) for length in case.lens]
        assert num_splits.diff().tolist() == shares
