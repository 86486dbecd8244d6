"""What the package's library gives to other code of the process (tests/check_exports.py)."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from flashmla import _library

PATH = Path(__file__).parents[1] / "check_exports.py"


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_the_operators_library_exports_the_c_interface_alone():
    spec = importlib.util.spec_from_file_location("check_exports", PATH)
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    # torch finds the operators by the library's constructors, which have no names to export.
    assert checker.others(str(_library.LIBRARY_PATH)) == []
