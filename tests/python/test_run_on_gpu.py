"""The runner of the GPU tests (tests/cuda/run_on_gpu.py): it must not call a failure a success."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "cuda/run_on_gpu.py"


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_on_gpu", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def shell(runner, script: str, judge, limit: float = 60.0):
    step = runner.Step("step", ["sh", "-c", script], limit, judge)
    return runner.run(step, time.monotonic() + 60)


@pytest.mark.parametrize(
    ("script", "verdict", "counts"),
    [
        ("echo 'ok   a'; echo 'ok   b'; echo 'PASSED: 0 failed'", "passed", "2 passed, 0 failed"),
        ("echo 'ok   a'; echo 'FAIL b'; exit 1", "FAILED", "1 passed, 1 failed"),
        ("echo 'ok   a'; echo 'an illegal memory access'; exit 2", "FAILED", "1 passed, 0 failed"),
        ("echo 'no CUDA device was found'", "FAILED", "0 passed, 0 failed"),
    ],
)
def test_cuda_check_is_judged_by_its_lines(runner, script, verdict, counts):
    outcome = shell(runner, script, runner.by_lines)
    assert (outcome.verdict, outcome.counts) == (verdict, counts)
    assert bool(outcome.failures) == (verdict == "FAILED")


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", "passed"),
        (
            "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'",
            "passed",
        ),
        ("echo '========= ERROR SUMMARY: 0 errors'; exit 1", "FAILED"),
        ("echo '========= ERROR SUMMARY: 11 errors'; exit 9", "FAILED"),
        ("echo '========= RACECHECK SUMMARY: 1 hazard displayed'", "FAILED"),
        ("echo 'Device not supported'", "FAILED"),
    ],
)
def test_a_sanitizer_is_judged_by_its_summary_and_status(runner, script, verdict):
    assert shell(runner, script, runner.by_sanitizer).verdict == verdict


def test_pytest_is_judged_by_its_file(runner, tmp_path):
    tests = tmp_path / "test_these.py"
    junit = tmp_path / "junit.xml"
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider --junit-xml={junit} {tests}"
    judge = runner.by_junit(junit)
    assert shell(runner, "true", judge).verdict == "FAILED"  # no file

    tests.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('x')\n")
    outcome = shell(runner, command, judge)
    assert (outcome.verdict, outcome.counts) == ("passed", "1 passed, 0 failed, 1 skipped")

    tests.write_text("def test_a(): pass\ndef test_b(): assert 1 == 2\n")
    outcome = shell(runner, command, judge)
    assert (outcome.verdict, outcome.counts) == ("FAILED", "1 passed, 1 failed, 0 skipped")
    ((name, text),) = outcome.failures
    assert name.endswith("test_b")
    assert "assert 1 == 2" in text

    tests.write_text("import pytest\ndef test_b(): pytest.skip('x')\n")
    assert shell(runner, command, judge).verdict == "FAILED"  # nothing was tested


def test_a_step_ends_at_its_limit_with_all_its_processes(runner):
    begin = time.monotonic()
    outcome = shell(runner, "echo begun; sleep 100 & sleep 100", runner.by_status, limit=5.0)
    assert time.monotonic() - begin < 30
    assert outcome.verdict == "FAILED"
    assert "did not end within 5 s" in outcome.counts
    assert "begun" in outcome.failures[0][1]


def test_a_step_that_cannot_run_is_no_success(runner):
    missing = runner.Step("step", ["true"], 60, runner.by_status, "pytest is not installed")
    outcome = runner.run(missing, time.monotonic() + 60)
    assert outcome.verdict == "NOT RUN: pytest is not installed"
    late = runner.Step("step", ["true"], 60, runner.by_status)
    assert runner.run(late, time.monotonic()).verdict == "NOT RUN: no time was left"


def test_the_report_names_what_failed(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "machine", lambda: "NVIDIA H200")
    times = tmp_path / "h200.csv"
    times.write_text("workload,mode,us,commit\n1x1 h128 s1,burst,4.00,abc\n")
    arguments = runner.argparse.Namespace(commit="abc", csv=times)
    done = {
        "good": runner.Outcome("passed", "3 passed", 1.0),
        "bad": runner.Outcome("FAILED", "1 failed", 2.0, [("a test", "its text")]),
    }
    runner.write_report(tmp_path / "new/report.md", arguments, done, 3.0)
    text = (tmp_path / "new/report.md").read_text()
    for part in ("commit: abc", "NVIDIA H200", "| bad | FAILED | 1 failed | 2 |", "## bad: a test"):
        assert part in text
    assert "```\nits text\n```" in text
    assert "| 1x1 h128 s1 | burst | 4.00 |" in text


def test_without_hypothesis_the_rest_runs_and_it_is_said(tmp_path):
    missing = 'raise ModuleNotFoundError("No module named hypothesis", name="hypothesis")\n'
    (tmp_path / "hypothesis.py").write_text(missing)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(tmp_path), *filter(None, [environment.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "hypothesis is not installed; left out: test_attention.py, " in done.stdout
    assert "test_calls_beside_other_work_give_the_same_bits" in done.stdout
