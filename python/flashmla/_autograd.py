"""What autograd is told of an operator that changes its arguments.

torch's own in-place operators raise the version of a tensor, so that a backward pass that saved it
notices. An operator of the stable ABI gets no such kernel from its schema, and cannot have one in
C++: below it the call would have to go on, for which that ABI has no means.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version


def _decode_out(keys: torch._C.DispatchKeySet, *arguments) -> None:
    increment_version(arguments[-2:])
    below = keys & torch._C._after_ADInplaceOrView_keyset
    torch.ops.flashmla.decode_out.default.redispatch(below, *arguments)


def register() -> None:
    """Registers the kernel, once: a package that is imported again finds it there."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("flashmla::decode_out", "ADInplaceOrView"):
        return
    kernels = torch.library.Library("flashmla", "IMPL")
    kernels.impl("decode_out", _decode_out, "ADInplaceOrView", with_keyset=True)
    torch.ops.flashmla._autograd_kernels = kernels  # which last as long as this does
