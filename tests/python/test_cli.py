"""The command line, run as its users run it: output, files, messages, exit statuses."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import flashmla
from flashmla import _library, cases, reference


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `flashmla ARGUMENTS` in a process of its own."""
    variables = {**os.environ, "COLUMNS": "250", **environment}
    command = [sys.executable, "-m", "flashmla", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def refusal(monkeypatch, capsys):
    """The message with which a command ends, run in this process: quicker, for many of them."""
    from flashmla.cli import main

    def refuse(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["flashmla", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 1
        return capsys.readouterr().err

    return refuse


@pytest.fixture(scope="module")
def inputs() -> cases.Inputs:
    case = cases.Case("cli", lens=(70, 5, 200), seq_len_q=2, heads=4, page=16, causal=True)
    return cases.make_inputs(case, torch.bfloat16)


def write(path: Path, inputs: cases.Inputs, metadata: dict[str, str] | None = None, **more) -> Path:
    """The tensors of `inputs` as a file; a value None in `more` leaves one out."""
    tensors = {
        "q": inputs.q,
        "k_cache": inputs.k_cache,
        "block_table": inputs.block_table,
        "cache_seqlens": inputs.cache_seqlens,
        **more,
    }
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, str(path), metadata=metadata)
    return path


def test_decode_writes_what_the_call_returns(tmp_path, inputs):
    source = write(tmp_path / "in.safetensors", inputs)
    target = tmp_path / "out.safetensors"
    done = run("decode", source, "-o", target, "--head-dim-v", 512, "--causal")
    assert done.returncode == 0, done.stderr
    found = load_file(str(target))
    plan = flashmla.get_mla_metadata(inputs.cache_seqlens, *inputs.plan_heads())
    out, lse = flashmla.flash_mla_with_kvcache(
        inputs.q,
        inputs.k_cache,
        inputs.block_table,
        inputs.cache_seqlens,
        512,
        *plan,
        causal=True,
    )
    # The other process may use other numbers of parts, and so round otherwise.
    bound = reference.TOLERANCES[torch.bfloat16]
    error = reference.errors(found["out"], found["softmax_lse"], out.double(), lse.double())
    assert found["out"].dtype == torch.bfloat16
    assert error[0] <= bound.out_relative
    assert error[1] <= bound.lse_absolute


def test_decode_takes_scalars_from_metadata_and_options_first(tmp_path, inputs):
    metadata = {"head_dim_v": "512", "softmax_scale": "0.1", "causal": "true"}
    source = write(tmp_path / "in.safetensors", inputs, metadata)
    kernel = "cpu_reference_bf16"
    lses = {}
    for name, options in {
        "metadata": [],
        "options": ["--softmax-scale", "0.02", "--no-causal"],
    }.items():
        target = tmp_path / f"{name}.safetensors"
        done = run("decode", source, "-o", target, "--kernel", kernel, *options)
        assert done.returncode == 0, done.stderr
        lses[name] = load_file(str(target))["softmax_lse"]
    for name, (scale, causal) in {"metadata": (0.1, True), "options": (0.02, False)}.items():
        _, expected = reference.attend(
            inputs.q,
            inputs.k_cache,
            inputs.block_table,
            inputs.cache_seqlens,
            512,
            scale,
            causal,
        )
        assert float((lses[name].double() - expected).abs().max()) < 2e-5


def test_decode_takes_a_plan_and_visible_lens(tmp_path, inputs):
    visible = torch.tensor([[1, 70], [0, 5], [64, 65]], dtype=torch.int32)
    plan = cases.plan_of(inputs, 1)
    source = write(
        tmp_path / "in.safetensors",
        inputs,
        {"head_dim_v": "512"},
        visible_lens=visible,
        tile_scheduler_metadata=plan[0],
        num_splits=plan[1],
    )
    target = tmp_path / "out.safetensors"
    done = run("decode", source, "-o", target)
    assert done.returncode == 0, done.stderr
    _, expected = reference.attend(
        inputs.q,
        inputs.k_cache,
        inputs.block_table,
        inputs.cache_seqlens,
        512,
        visible_lens=visible,
    )
    lse = load_file(str(target))["softmax_lse"].double()
    assert torch.equal(lse.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert float((lse - expected)[finite].abs().max()) < 2e-5


def test_decode_writes_nan_for_a_row_that_no_part_walks(tmp_path, inputs):
    source = write(
        tmp_path / "in.safetensors",
        inputs,
        {"head_dim_v": "512"},
        tile_scheduler_metadata=torch.tensor([[1, 0, 1, 1, 0, 0, 0, 0]], dtype=torch.int32),
        num_splits=torch.zeros(4, dtype=torch.int32),
    )
    target = tmp_path / "out.safetensors"
    done = run("decode", source, "-o", target)
    assert done.returncode == 0, done.stderr
    for tensor in load_file(str(target)).values():
        assert tensor[[0, 2]].isnan().all()
        assert tensor[1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "metadata", "options", "message"),
    [
        ({"block_table": None}, {}, ["--head-dim-v", 512], "missing: block_table"),
        ({"keys": torch.ones(1)}, {}, ["--head-dim-v", 512], "not known: keys"),
        ({"num_splits": torch.ones(4)}, {}, ["--head-dim-v", 512], "half of a plan"),
        (
            {"cache_seqlens": torch.tensor([70, -4, 200], dtype=torch.int32)},
            {},
            ["--head-dim-v", 512],
            "cache_seqlens[1] is -4",
        ),
        ({"q": torch.ones(3, 4)}, {}, ["--head-dim-v", 512], "q has shape (3, 4)"),
        ({"q": torch.ones(3, 2, 4, 576).int()}, {}, ["--head-dim-v", 512], "q has dtype int32"),
        (
            {"k_cache": torch.ones(40, 16, 30, 576).bfloat16()},
            {},
            ["--head-dim-v", 512],
            "q has 4 heads; they must be a multiple of the 30 heads of k_cache",
        ),
        ({}, {}, [], "--head-dim-v"),
        ({}, {"head_dim_v": "many"}, [], "head_dim_v = 'many'; it must be of type int"),
        (
            {},
            {"head_dim_v": "512", "causal": "perhaps"},
            [],
            "'perhaps'; it must be one of true, 1, false, 0",
        ),
        ({}, {"head_dim_v": str(2**63)}, [], "head_dim_v is 9223372036854775808; it must be an"),
        ({}, {}, ["--head-dim-v", 3], "(head_dim, head_dim_v) is (576, 3)"),
        ({}, {}, ["--head-dim-v", 512, "--kernel", "best"], "--kernel is best; it must be one of"),
    ],
)
def test_decode_refuses(tmp_path, inputs, refusal, change, metadata, options, message):
    source = write(tmp_path / "in.safetensors", inputs, metadata, **change)
    target = tmp_path / "out.safetensors"
    assert message in refusal("decode", source, "-o", target, *options)
    assert not target.exists()


def test_decode_refuses_files_that_it_cannot_read_or_write(tmp_path, inputs, refusal):
    missing = tmp_path / "none.safetensors"
    assert "cannot read" in refusal("decode", missing, "-o", tmp_path / "out")
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors here")
    assert "cannot read" in refusal("decode", text, "-o", tmp_path / "out")
    # What looks like markup of the console is shown as it is.
    assert "[bold]none[/bold]" in refusal("decode", "[bold]none[/bold]", "-o", tmp_path / "out")
    source = write(tmp_path / "in.safetensors", inputs)
    target = tmp_path / "none" / "out"
    assert "cannot write" in refusal("decode", source, "-o", target, "--head-dim-v", 512)


def test_decode_writes_into_what_is_there(tmp_path, inputs):
    # A new file in its place would turn a link, or a device, into a file.
    source = write(tmp_path / "in.safetensors", inputs)
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch(mode=0o640)
    link.symlink_to(target)
    done = run("decode", source, "-o", link, "--head-dim-v", 512)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert set(load_file(str(target))) == {"out", "softmax_lse"}


def test_the_forms_of_the_peer_compute_attention(monkeypatch):
    from flashmla.cli import bench

    q, cache = torch.randn(2, 5, 96), torch.randn(2, 70, 96)
    weights = (torch.einsum("brd,btd->brt", q, cache) * 96**-0.5).softmax(dim=-1)
    expected = torch.einsum("brt,btd->brd", weights, cache[..., :64])
    names = ["batched", "batched_transposed", "by_row", "by_row_transposed"]
    for place, name in enumerate(names):
        turns = iter(range(100))
        # Times under which the form at this place is the fastest.
        monkeypatch.setattr(
            bench, "_microseconds", lambda call, t=turns, p=place: float(next(t) % len(names) != p)
        )
        found, attend = bench._fastest_peer(lambda copy: cache, q, 64)
        assert found == name
        assert torch.allclose(attend(0), expected, atol=1e-5)


def test_check_of_one_kernel_passes():
    done = run("check", "--kernel", "cpu_portable_fp32", "--suite", "edge")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right" in done.stdout
    assert "wrong" not in done.stdout


def test_check_fails_on_a_wrong_result(monkeypatch, capsys):
    from flashmla.cli import check
    from flashmla.cli.console import Failure

    attend = reference.attend

    def off_by_one_percent(**arguments):
        out, lse = attend(**arguments)
        return out * 1.01, lse

    monkeypatch.setattr(reference, "attend", off_by_one_percent)
    with pytest.raises(Failure, match="checks failed"):
        check.run(kernel="cpu_portable_fp32", suite="edge")
    assert "wrong" in capsys.readouterr().out


def test_check_names_the_kernels_there_are(refusal):
    message = refusal("check", "--kernel", "nothing")
    assert all(kernel.name in message for kernel in _library.kernels())


def test_info_says_why_each_kernel_is_or_is_not_chosen():
    # FORCE_COLOR: continuous integration sets it, and JSON must stay JSON.
    done = run("info", "--json", "--dtype", "float16", FLASHMLA_ISA="portable", FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    verdicts = {kernel["name"]: kernel["verdict"] for kernel in facts["kernels"]}
    assert list(verdicts) == [kernel.name for kernel in _library.kernels()]
    assert verdicts["cpu_portable_fp16"] == "chosen"
    assert verdicts["cpu_reference_fp16"] == "fits; cpu_portable_fp16 comes first"
    assert verdicts["cpu_portable_fp32"] == "computes float32, q is float16"
    others = {name: verdict for name, verdict in verdicts.items() if name.endswith("x2_fp16")}
    assert all("needs AVX2" in verdict for verdict in others.values())
    assert facts["devices"][0]["verdict"] == "supported"
    # Into a pipe: a line a kernel, not folded, coloured or not.
    table = run("info", COLUMNS="", FORCE_COLOR="1")
    assert table.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table.stdout)
    lines = plain.split("kernels, best first")[1].splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(verdicts)
    assert "chosen" in table.stdout


def test_wrong_arguments_and_environment_end_in_a_message(refusal, monkeypatch):
    assert "is (77, 512); it must be one of" in refusal("info", "--head-dim", 77)
    assert "--dtype is int8" in refusal("info", "--dtype", "int8")
    assert "--device is tpu; it must be cpu or cuda" in refusal("info", "--device", "tpu")
    assert "q has 2 heads; they must be" in refusal("info", "--heads", 2, "--kv-heads", 3)
    assert "batch " in refusal("info", "--batch", 2**31)
    assert "page_block_size " in refusal("info", "--page", 2**40)
    assert "99999999999999/512" in refusal("info", "--head-dim", 99999999999999)
    for size in ("batch", "seq-len-q", "heads", "kv-heads", "head-dim", "head-dim-v", "page"):
        message = f"{size.replace('-', '_')} is {2**63}; it must be an integer of 64 bits"
        assert message in refusal("info", f"--{size}", 2**63)
    assert "2147483647 queries" in refusal("info", "--heads", 2**31 - 1, "--seq-len-q", 2**31 - 1)
    monkeypatch.setenv("FLASHMLA_ISA", "fast")
    for command in ("info", "check", "demo", "bench"):
        assert 'FLASHMLA_ISA is "fast"' in refusal(command)
    assert run("info", "--no-such-option").returncode == 2
    assert run("no-such-command").returncode == 2
    assert run("--help").returncode == 0


@pytest.mark.parametrize("command", ["demo", "decode a -o b", "check", "bench", "info"])
def test_wrong_words_about_the_names_of_vllm_end_every_command_in_one_line(command):
    done = run(*command.split(), FLASHMLA_REGISTER_VLLM_NAMES="yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "flashmla: FLASHMLA_REGISTER_VLLM_NAMES is 'yes'; it must be 0 or 1\n"


def test_says_its_version():
    assert run("--version").stdout == f"{flashmla.__version__}\n"
    assert run("info", "--version").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_output_that_cannot_be_written_ends_in_a_message():
    command = [sys.executable, "-m", "flashmla", "info"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_standard_output_takes_what_is_written():
    for command in ("info", "info --json", "--version"):
        line = f"exec {sys.executable} -m flashmla {command} >&-"
        done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_be_encoded_ends_in_a_message():
    done = run("demo", "--prompt", "été", "--tokens", 1, PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "'ascii' codec can't encode" in done.stderr


def test_bench_times_a_workload_and_writes_its_files(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    done = run(
        *("bench", "--quick", "--only", "1x64 h16", "--threads", 1, "--isa", "portable"),
        *("--json", "--csv", tmp_path, "--plot", plot),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["workload"], row["isa"], row["threads"]) == ("1x64 h16 s1", "portable", 1)
    assert row["us"] > 0
    assert row["gflops"] == pytest.approx(64 * 16 * 2 * 1088 / row["us"] / 1e3, rel=0.1)
    assert row["torch_us"] > 0
    assert row["unit_gflops"] > 0
    assert row["relative_error"] < reference.TOLERANCES[torch.bfloat16].out_relative
    (path,) = tmp_path.glob("*.csv")
    (written,) = csv.DictReader(path.read_text().splitlines())
    assert float(written["us"]) == row["us"]
    assert plot.read_text().lstrip().startswith("<?xml")


def test_bench_holds_both_sides_to_the_cap_of_the_environment(monkeypatch, capsys):
    from flashmla.cli import bench

    monkeypatch.setenv("FLASHMLA_ISA", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    seen = []
    monkeypatch.setattr(bench, "_measure_all", lambda *given: seen.append(given[3]) or [])
    bench.run(as_json=True, commit="abc")
    assert seen == ["avx2"]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--isa", "best"], "--isa is best; it must be one of portable, avx2"),
        (["--only", "nothing"], "no workload contains 'nothing'"),
        (["--threads", 0], "--threads is 0; it must be between 1 and "),
        (["--threads", 2**63], f"--threads is {2**63}; it must be between 1 and "),
        (["--dtype", "int8"], "--dtype is int8"),
        (["--memory", "nan"], "--memory is nan; a cache needs 0.0001 to 2474 GB"),
        (["--memory", "inf"], "--memory is inf; a cache needs 0.0001 to 2474 GB"),
        (["--memory", "1e300"], "--memory is 1e+300; a cache needs 0.0001 to 2474 GB"),
    ],
)
def test_bench_refuses(refusal, options, message):
    assert message in refusal("bench", *options)


# What the package's GPU benchmark prints, by a program that needs no GPU.
PRINTED = [
    "workload,mode,us,tflops,gbs,percent_of_ceiling,relative_error",
    "ceiling read,burst,,,4549,,",
    "128x8192 h128 s1,burst,457.60,638.2,2640,74.8,1.81e-03",
    "128x8192 h128 s1,apart_sustained,544.14,536.7,2220,68.3,1.81e-03",
    "plan b8192,sustained,16.90,,,,",
]


@pytest.fixture
def gpu_program(tmp_path, monkeypatch):
    """Puts a program that prints the given lines in the place of the package's."""
    from flashmla.cli import bench, bench_cuda

    monkeypatch.setattr(bench, "require_support", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "cuda_bench"
    monkeypatch.setattr(bench_cuda, "PROGRAM", path)

    def make(lines: list[str], status: int = 0) -> None:
        quoted = "\n".join(f"echo '{line}'" for line in lines)
        path.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\n{quoted}\nexit {status}\n')
        path.chmod(0o755)

    return make


def test_bench_of_a_gpu_shows_and_writes_what_its_program_measured(gpu_program, tmp_path, capsys):
    from flashmla.cli import bench

    gpu_program(PRINTED)
    bench.run(device="cuda", only="8192", kernel="k", commit="abc", csv_path=tmp_path, as_json=True)
    assert (tmp_path / "arguments").read_text() == "8192 k\n"
    rows = json.loads(capsys.readouterr().out)
    assert [row["us"] for row in rows] == [None, 457.6, 544.14, 16.9]
    written = (tmp_path / "h200.csv").read_text().splitlines()
    assert written[0] == PRINTED[0] + ",commit,date"
    for line, printed in zip(written[1:], PRINTED[1:], strict=True):
        assert line.startswith(printed + ",abc,20")
    bench.run(device="cuda", commit="abc")
    assert "128x8192 h128 s1  apart_sustained  544.14" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "status", "options", "message"),
    [
        (PRINTED, 2, {}, "ended with status 2"),
        (["no CUDA device was found"], 0, {}, "printed 'no CUDA device was found' where"),
        ([*PRINTED, "half,a,line"], 0, {}, "printed 'half,a,line', not 7 columns"),
        (PRINTED[:2], 0, {"only": "none"}, "no workload contains 'none'"),
        (PRINTED, 0, {"threads": [1]}, "--threads is given; on cuda it has no meaning"),
        (PRINTED, 0, {"dtype": "float16"}, "on cuda dtype is bfloat16"),
        (PRINTED, 0, {"device": "tpu"}, "--device is tpu; it must be cpu or cuda"),
        (PRINTED, 0, {"device": "cpu"}, "on the CPU --isa decides"),
        (PRINTED, 0, {"csv_path": Path("/none/there")}, "cannot write /none/there"),
    ],
)
def test_bench_of_a_gpu_refuses(gpu_program, lines, status, options, message):
    from flashmla.cli import bench
    from flashmla.cli.console import Failure

    gpu_program(lines, status)
    with pytest.raises(Failure, match=re.escape(message)):
        bench.run(**({"device": "cuda", "kernel": "k", "commit": "abc"} | options))


def test_bench_measures_memory_beside_a_cache():
    done = run("bench", "--memory", 0.2)
    assert done.returncode == 0, done.stderr
    more = float(done.stdout.split("at most ")[1].split(" MB")[0])
    assert more < 20, done.stdout


def test_demo_equals_the_plain_model(tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("In the beginning [/bold] God")
    done = run("demo", "--prompt-file", prompt, "--tokens", 12, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    assert "In the beginning [/bold] God" in done.stdout
    assert "12 of 12 tokens equal" in done.stdout
    assert "tokens/s" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--tokens", 0], "num_tokens is 0"),
        (["--tokens", 5000], "context length, 1024"),
        (["--page-size", 0], "page_size is 0"),
        (["--page-size", 2**70], "context length, 1024"),
        (["--seed", 2**64], "seed is 18446744073709551616; it must be a number of 64 bits"),
        (["--seed", -(2**63) - 1], "seed is -9223372036854775809"),
        (["--temperature", -1], "temperature is -1"),
        (["--dtype", "int8"], "--dtype is int8"),
        (["--prompt", "a", "--prompt-file", "b"], "both given"),
        (["--prompt-file", "none.txt"], "cannot read the prompt"),
    ],
)
def test_demo_refuses(refusal, options, message):
    assert message in refusal("demo", *options)
