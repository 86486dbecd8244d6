"""The torch operators by name: `operators.decode` is `torch.ops.flashmla.decode`.

`torch.ops` makes its attributes at run time, so no type checker knows them; `operators.pyi` gives
their signatures, which are the registered schemas.
"""

from __future__ import annotations

import torch


def __getattr__(name: str):
    return getattr(torch.ops.flashmla, name)
