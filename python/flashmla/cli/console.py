"""What the commands share: consoles, and the error that ends a command in one line."""

from __future__ import annotations

import json
import os
import sys

from rich.console import Console
from rich.markup import escape

import flashmla
from flashmla import _library

console = Console(highlight=False)
# None: the process was started with its standard output closed.
if sys.stdout is not None and not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
    console.width = 250  # a pipe or a file has no width to fold or cut a table for
errors = Console(stderr=True)


class Failure(Exception):
    """Ends the command with its message and status 1: a mistake of the user or the machine."""


def require_support(device: str) -> None:
    """Fails where attention does not run on the device."""
    supported, reason = flashmla.is_flashmla_supported(device)
    if not supported:
        raise Failure(reason)


def show_failure(failure: Failure) -> None:
    """Prints the message as it is: a shape in brackets is no markup."""
    errors.print(f"[bold red]flashmla:[/] {escape(str(failure))}", highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Prints for programs: never coloured or wrapped, whatever the console is told to do."""
    print(json.dumps(value, indent=2))


def kernels() -> list[_library.Kernel]:
    """The library's kernels; fails where FLASHMLA_ISA holds a word that it does not know."""
    try:
        return _library.kernels()
    except RuntimeError as error:
        raise Failure(str(error)) from None


def kernel_named(name: str) -> _library.Kernel:
    """The kernel of that name; fails, listing all names, where there is none."""
    for kernel in kernels():
        if kernel.name == name:
            return kernel
    names = ", ".join(kernel.name for kernel in kernels())
    raise Failure(f"--kernel is {name}; it must be one of {names}")
