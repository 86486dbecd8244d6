"""The command line, run as a program."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from inputs import attend, formula_inputs, library_plan, same_bits
from safetensors.torch import load_file, save_file


def flashmla(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashmla", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def stored(tmp_path):
    inputs = formula_inputs([130, 97], 8, 2)
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    path = tmp_path / "in.safetensors"
    save_file({name: getattr(inputs, name) for name in names}, str(path))
    return inputs, path


@pytest.mark.parametrize("causal", [True, False])
def test_decode_writes_what_the_function_returns(stored, tmp_path, causal):
    inputs, path = stored
    inputs.causal = causal
    flags = ["--causal"] if causal else []
    result = tmp_path / "out.safetensors"
    done = flashmla(
        "decode", path, "-o", result, "--head-dim-v", 512, "--softmax-scale", 0.25, *flags
    )
    assert done.returncode == 0, done.stderr
    found = load_file(str(result))
    expected = attend(inputs)
    assert same_bits(found["out"], expected[0])
    assert same_bits(found["softmax_lse"], expected[1])


def test_decode_takes_a_plan_and_visible_lens(stored, tmp_path):
    inputs, path = stored
    inputs.visible_lens = torch.tensor([[5, 130], [0, 97]], dtype=torch.int32)
    metadata, num_splits = library_plan(inputs)
    save_file(
        load_file(str(path))
        | {
            "visible_lens": inputs.visible_lens,
            "tile_scheduler_metadata": metadata,
            "num_splits": num_splits,
        },
        str(path),
    )
    result = tmp_path / "out.safetensors"
    done = flashmla("decode", path, "-o", result, "--head-dim-v", 512, "--softmax-scale", 0.25)
    assert done.returncode == 0, done.stderr
    assert same_bits(load_file(str(result))["out"], attend(inputs)[0])


def test_decode_explains_a_wrong_file(stored, tmp_path):
    _, path = stored
    tensors = load_file(str(path))
    result = tmp_path / "out.safetensors"
    for change, message in [
        (lambda t: t.pop("q"), "missing: q"),
        (lambda t: t.update(extra=torch.zeros(1)), "not known: extra"),
        (lambda t: t.update(num_splits=torch.zeros(3)), "half of a plan"),
        (lambda t: t.update(cache_seqlens=torch.tensor([130, -4]).int()), "cache_seqlens[1] is -4"),
        (lambda t: t.update(q=torch.zeros(3)), "q has shape (3,)"),
    ]:
        changed = dict(tensors)
        change(changed)
        save_file(changed, str(path))
        done = flashmla("decode", path, "-o", result, "--head-dim-v", 512)
        assert done.returncode == 1
        assert message in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
        assert not result.exists()
    done = flashmla("decode", tmp_path / "none", "-o", result)
    assert done.returncode == 1
    assert "cannot read" in done.stderr


def test_check_is_right_for_a_kernel():
    done = flashmla("check", "--kernel", "cpu_portable", "--suite", "edge")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 3
    done = flashmla("check", "--kernel", "nothing")
    assert done.returncode == 1
    assert "there are" in done.stderr


def test_info_names_the_choice():
    done = flashmla("info", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("chosen") == 1
    assert "cpu_portable_fp32" in done.stdout
    assert flashmla("info", "--dtype", "int8").returncode == 1


def test_bench_prints_numbers_that_are_consistent(tmp_path):
    csv = tmp_path / "rows.csv"
    only = ["--only", "1x64", "--threads", 1]
    done = flashmla("bench", "--quick", *only, "--json", "--csv", csv)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["workload"] == "1x64 h16 s1"
    assert row["us"] > 0
    assert row["relative_error"] < 3e-3
    assert row["gflops"] == pytest.approx(64 * 16 * 2 * 1088 / row["us"] / 1e3, rel=0.1)
    assert csv.read_text().startswith("workload,isa,threads,us,")
    done = flashmla("bench", "--isa", "sse9")
    assert done.returncode == 1
    assert "--isa is sse9" in done.stderr


def test_demo_shows_that_the_tokens_are_equal():
    done = flashmla("demo", "--tokens", 12, "--prompt", "And the king said unto", "--page-size", 16)
    assert done.returncode == 0, done.stderr
    flat = " ".join(done.stdout.split())
    assert "12 of 12 tokens equal the plain PyTorch model's" in flat
    assert "tokens/s" in flat


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--tokens", 0], "num_tokens is 0"),
        (["--tokens", 5000], "context length, 1024"),
        (["--page-size", 0], "page_size is 0"),
        (["--temperature", -1], "temperature is -1"),
        (["--dtype", "int8"], "--dtype is int8"),
        (["--prompt", "a", "--prompt-file", "b"], "both given"),
        (["--prompt-file", "none.txt"], "cannot read the prompt"),
    ],
)
def test_demo_explains_wrong_options(arguments, message):
    done = flashmla("demo", *arguments)
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_help_and_unknown_commands():
    assert flashmla("--help").returncode == 0
    assert flashmla("nothing").returncode == 2
