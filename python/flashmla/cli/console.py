"""What the commands share: consoles, and the error that ends a command in one line."""

from __future__ import annotations

from rich.console import Console

import flashmla

console = Console(highlight=False)
errors = Console(stderr=True)


class Failure(Exception):
    """Ends the command with its message and status 1: a mistake of the user or the machine."""


def require_support(device: str) -> None:
    """Fails where attention does not run on the device."""
    supported, reason = flashmla.is_flashmla_supported(device)
    if not supported:
        raise Failure(reason)
