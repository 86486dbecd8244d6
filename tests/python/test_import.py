"""What importing does: nothing that is seen, with the extension and without, beside vLLM too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import KERNELS

import flash_mla
import flashmla
from flashmla import _library

PACKAGE = Path(flashmla.__file__).parent


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def output(code: str, **environment: str) -> str:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.fixture
def without_extension(tmp_path) -> str:
    """A path that holds the package's Python files alone."""
    ignore = shutil.ignore_patterns("*.so", "*.safetensors", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "flashmla", ignore=ignore)
    return str(tmp_path)


def test_is_quiet():
    assert output("import torch, flashmla") == ""


def test_has_the_version_of_the_installed_package():
    assert flashmla.__version__ == metadata.version("flashmla")


def test_imports_nothing_of_the_command_line():
    heavy = "typer rich matplotlib safetensors"
    code = (
        f"import sys, torch; before = set(sys.modules); import flashmla; "
        f"print([m for m in {heavy.split()!r} if m in set(sys.modules) - before])"
    )
    assert output(code) == "[]"


def test_starts_no_cuda_context():
    code = """
import torch, flashmla
flashmla.is_flashmla_supported()
print(torch.cuda.is_initialized())
"""
    assert output(code) == "False"


def test_without_the_extension_a_call_says_how_to_install_it(without_extension):
    code = """
import flashmla, torch
supported, reason = flashmla.is_flashmla_supported()
assert not supported and not flashmla._flashmla_C_AVAILABLE
assert "pip install" in reason and "_flashmla_torch.so" in reason, reason
try:
    flashmla.get_mla_metadata(torch.zeros(1, dtype=torch.int32), 1, 1)
except RuntimeError as error:
    print(str(error)[:24])
"""
    assert output(code, PYTHONPATH=without_extension) == "flashmla cannot compute:"


def test_without_the_extension_the_newer_packages_name_imports_too(without_extension):
    newer = Path(flash_mla.__file__).parent
    shutil.copytree(newer, Path(without_extension) / "flash_mla")
    assert output("import flash_mla", PYTHONPATH=without_extension) == ""


def test_the_extension_may_lie_in_another_folder_of_the_package(without_extension, tmp_path):
    # As `pip install -e` has it: the sources' folder and the one of what was compiled.
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    (compiled / _library.LIBRARY_PATH.name).symlink_to(_library.LIBRARY_PATH)
    sources = Path(without_extension) / "flashmla"
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "flashmla",
    {str(sources / "__init__.py")!r},
    submodule_search_locations=[{str(compiled)!r}, {str(sources)!r}],
)
sys.modules["flashmla"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module._flashmla_C_AVAILABLE)
"""
    assert output(code) == "True"


def test_the_installed_package_is_found_from_the_source_checkout():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", "import flashmla; print(flashmla._flashmla_C_AVAILABLE)"],
        capture_output=True,
        text=True,
        cwd=root,
        check=True,
    )
    assert done.stdout.strip() == "True"


DEFINED = "import torch; library = torch.library.Library('_flashmla_C', 'DEF'); "
OTHER = DEFINED + "library.define('fwd_kvcache_mla(Tensor q) -> Tensor'); "
SCHEMA = "print(torch.ops._flashmla_C.fwd_kvcache_mla.default._schema)"


def test_leaves_a_library_alone_that_another_package_defined():
    assert output(OTHER + "import flashmla; " + SCHEMA) == (
        "_flashmla_C::fwd_kvcache_mla(Tensor q) -> Tensor"
    )
    found = output(DEFINED + "import flashmla; print(flashmla.is_flashmla_supported('cpu')[0])")
    assert found == "True"


def test_registers_nothing_in_a_library_that_it_cannot_define(monkeypatch):
    calls = []
    stand_in = SimpleNamespace(
        flashmla_torch_has_vllm_names=lambda: 0,
        flashmla_torch_register_vllm_names=lambda: calls.append(1),
    )
    monkeypatch.setattr(_library, "_library", stand_in)
    monkeypatch.setattr(_library, "NAMES_ERROR", None)
    monkeypatch.setenv("FLASHMLA_REGISTER_VLLM_NAMES", "1")
    assert not _library.register_vllm_names()
    assert calls == []
    assert "another package defines that library" in _library.NAMES_ERROR


def test_leaves_the_names_to_vllm_that_is_installed_but_not_imported(tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "_flashmla_C.abi3.so").touch()
    code = "import torch, flashmla; print(hasattr(torch.ops._flashmla_C, 'fwd_kvcache_mla'))"
    assert output(code, PYTHONPATH=str(tmp_path)) == "False"
    forced = output(code, PYTHONPATH=str(tmp_path), FLASHMLA_REGISTER_VLLM_NAMES="1")
    assert forced == "True"


@pytest.mark.parametrize("stand_in", ["types.ModuleType('vllm')", "unittest.mock.MagicMock()"])
def test_a_stand_in_for_vllm_is_no_vllm(stand_in):
    code = f"import sys, types, unittest.mock; sys.modules['vllm'] = {stand_in}; import flashmla; "
    assert output(code + "print(flashmla._vllm_names_registered)") == "True"


def test_the_environment_decides_about_the_names():
    code = "import torch, flashmla; print(hasattr(torch.ops._flashmla_C, 'fwd_kvcache_mla'))"
    assert output(code) == "True"
    assert output(code, FLASHMLA_REGISTER_VLLM_NAMES="0") == "False"


REFUSALS = """
import torch, flashmla, flash_mla
print(flashmla._flashmla_C_AVAILABLE, *flashmla.is_flashmla_supported("cpu"))
lens = torch.zeros(1, dtype=torch.int32)
for call in (
    lambda: flashmla.get_mla_metadata(lens, 1, 1),
    lambda: flashmla.flash_mla_with_kvcache(lens, lens, lens, lens, 64, lens, lens),
    lambda: flashmla.merge_attention_states([lens], [lens]),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("before", "value", "message"),
    [
        ("", "yes", "FLASHMLA_REGISTER_VLLM_NAMES is 'yes'; it must be 0 or 1"),
        (OTHER, "1", "cannot register torch.ops._flashmla_C: another package defines that library"),
    ],
)
def test_what_the_environment_asks_for_in_vain_is_told_by_every_call(before, value, message):
    lines = output(before + REFUSALS, FLASHMLA_REGISTER_VLLM_NAMES=value).splitlines()
    assert lines[0].startswith(f"False False {message}")
    assert len(lines) == 4
    assert all(line.startswith(f"flashmla cannot compute: {message}") for line in lines[1:])


RELOADED = """
import gc, importlib, sys, torch
import flashmla
from inputs import attend, attend_into, formula_inputs, library_plan, same_bits
inputs = formula_inputs([70], 2)
plan = library_plan(inputs)
expected = attend(inputs, plan)
registered = flashmla._vllm_names_registered
if {afresh}:
    for name in [name for name in sys.modules if name.split(".")[0] == "flashmla"]:
        del sys.modules[name]
    del flashmla, attend, attend_into, library_plan, formula_inputs, inputs
    del sys.modules["inputs"]
    gc.collect()
    import flashmla
    gc.collect()
    from inputs import attend, attend_into, formula_inputs, library_plan
    inputs = formula_inputs([70], 2)
else:
    assert importlib.reload(flashmla) is flashmla
    importlib.reload(flashmla._library)
    importlib.reload(flashmla)
assert flashmla._vllm_names_registered == registered == {registered}
assert flashmla._flashmla_C_AVAILABLE and flashmla.__version__ != "0+unknown"
for found in (
    attend(inputs, plan),
    torch.compile(attend, backend="eager")(inputs, plan),
):
    assert all(map(same_bits, found, expected))
assert flashmla.get_mla_metadata(inputs.cache_seqlens.to("meta"), 2, 1)[0].is_meta
if registered:
    lens = inputs.cache_seqlens.to("meta")
    assert torch.ops._flashmla_C.get_mla_metadata(lens, 2, 1)[0].is_meta
    try:
        torch.library.Library("_flashmla_C", "DEF")
        raise AssertionError("another package may define what is ours")
    except RuntimeError:
        pass
out, lse = torch.zeros_like(expected[0]), torch.zeros_like(expected[1])
attend_into(inputs, plan, "cpu", out, lse)
assert (out._version, lse._version) == (1, 1) and same_bits(out, expected[0])
"""


@pytest.mark.parametrize("afresh", [True, False])
@pytest.mark.parametrize("names", ["0", "1", ""])
def test_may_be_loaded_again(afresh, names):
    registered = names != "0"
    code = RELOADED.format(afresh=afresh, registered=registered)
    path = str(Path(__file__).parent)
    path = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    assert output(code, FLASHMLA_REGISTER_VLLM_NAMES=names, PYTHONPATH=path) == ""


def test_an_unknown_instruction_set_is_named():
    code = """
import torch, flashmla
print(*flashmla.is_flashmla_supported("cpu"), sep="\\n")
q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 64, 1, 64)
lens, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
plan = torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0]], dtype=torch.int32), lens.new_zeros(2)
for call in (
    lambda: flashmla.get_mla_metadata(lens, 1, 1),
    lambda: flashmla.flash_mla_with_kvcache(q, k, table, lens, 64, *plan),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""
    message = 'FLASHMLA_ISA is "sse9"; it must be one of portable, neon, avx2, avx512, amx'
    assert output(code, FLASHMLA_ISA="sse9").splitlines() == ["False", message, message, message]


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_a_call_computes_with_the_cap(isa):
    code = """
import torch, flashmla
from inputs import attend, formula_inputs, same_bits
from conftest import KERNELS
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    inputs = formula_inputs([130, 97], 20, 2, causal=True, dtype=dtype)
    found = attend(inputs)
    same = {
        kernel.instruction_set
        for kernel in KERNELS
        if kernel.dtype == dtype and same_bits(attend(inputs, kernel=kernel)[0], found[0])
    }
    print(" ".join(sorted(same)))
"""
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    usable = {kernel.instruction_set for kernel in KERNELS}
    order = ["portable", "avx2", "avx512"]
    best = [name for name in order[: order.index(isa) + 1] if name in usable][-1]
    lines = output(code, FLASHMLA_ISA=isa, PYTHONPATH=path).splitlines()
    assert len(lines) == 3
    assert all(best in line.split() for line in lines)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx"])
def test_the_instruction_set_can_be_capped(isa):
    code = """
import torch
from flashmla import _library
print(" ".join(sorted({k.instruction_set for k in _library.kernels() if k.usable})))
"""
    order = ["portable", "avx2", "avx512", "amx"]
    found = set(output(code, FLASHMLA_ISA=isa).split())
    assert found <= {*order[: order.index(isa) + 1], "reference"}
    assert {"portable", "reference"} <= found
