"""Multi-head latent attention (MLA) over a paged key/value cache.

metadata, num_splits = get_mla_metadata(cache_seqlens, seq_len_q * num_heads_q, 1)
out, lse = flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, 512, metadata, num_splits, causal=True
)

Every log-sum-exp that this package returns or takes is a natural logarithm.
"""

from flashmla import _library
from flashmla.attention import (
    flash_mla_with_kvcache,
    get_mla_metadata,
    is_flashmla_supported,
    merge_attention_states,
)

__version__ = "0+unknown"
_vllm_names_registered = False  # whether torch.ops._flashmla_C is this package's

if _library.LOAD_ERROR is None:
    from flashmla import _autograd, _fakes

    _vllm_names_registered = _library.register_vllm_names()
    __version__ = _library.version()
    _autograd.register()
    _fakes.register("flashmla")
    if _vllm_names_registered:
        _fakes.register("_flashmla_C")
_flashmla_C_AVAILABLE = _library.why_unavailable() is None

__all__ = [
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "is_flashmla_supported",
    "merge_attention_states",
]
