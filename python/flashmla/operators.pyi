# The schemas that bindings/torch/operators.cpp registers, as Python sees them. The first two are
# those of torch.ops._flashmla_C as well. Shapes and dtypes: flashmla.attention.
import torch

def fwd_kvcache_mla(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def get_mla_metadata(
    cache_seqlens: torch.Tensor, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]: ...

# kernel_index: a Kernel.index of flashmla._library.kernels() to force; -1 leaves the choice to the
# library.
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    visible_lens: torch.Tensor | None,
    kernel_index: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]: ...

# A backward pass that saved out or softmax_lse notices that they have changed.
def decode_out(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    visible_lens: torch.Tensor | None,
    kernel_index: int,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
) -> None: ...
def merge_attention_states(
    outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
