"""The case list (cases/*.json; the schema is in cases/README.md) and inputs made from it."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from flashmla import reference


@dataclass(frozen=True)
class Case:
    """One problem; the fields are those of cases/README.md."""

    name: str
    lens: tuple[int, ...]
    head_dim: int = 576
    head_dim_v: int = 512
    heads: int = 16
    kv_heads: int = 1
    seq_len_q: int = 1
    page: int = 64
    causal: bool = False
    visible: tuple[tuple[int, ...], ...] | None = None
    scale: float | None = None
    q_amplitude: float = 1.0
    parts: tuple[int, ...] = (1, 5)

    @property
    def flops(self) -> int:
        """Products and sums of scores and values, nothing masked."""
        return sum(self.lens) * self.heads * self.seq_len_q * 2 * (self.head_dim + self.head_dim_v)

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the cached vectors that are read, each once."""
        return sum(self.lens) * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass
class Inputs:
    """The tensors of a case, named as the arguments of `flash_mla_with_kvcache`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    head_dim_v: int
    softmax_scale: float | None
    causal: bool
    visible_lens: torch.Tensor | None

    def to(self, device: str) -> Inputs:
        """The same inputs with every tensor on `device`."""
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return Inputs(**moved)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of these inputs in float64."""
        return reference.attend(**vars(self))

    def plan_heads(self) -> tuple[int, int]:
        """num_heads_per_head_k and num_heads_k of the planning call."""
        num_heads_k = self.k_cache.shape[2]
        return self.q.shape[1] * self.q.shape[2] // num_heads_k, num_heads_k


def _folder() -> Path:
    installed = Path(__file__).parent / "cases"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "cases"


def load(name: str) -> list[Case]:
    """The cases of `<name>.json`: "dense", "edge" or "perf"."""
    rows = json.loads((_folder() / f"{name}.json").read_text())
    cases = []
    for row in rows:
        for field in ("lens", "parts"):
            if field in row:
                row[field] = tuple(row[field])
        if "visible" in row:
            row["visible"] = tuple(tuple(counts) for counts in row["visible"])
        cases.append(Case(**row))
    return cases


def make_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """Standard-normal values, pages in random order, everything that no token owns poisoned.

    Unowned slots hold NaN, unused table entries absurd block ids.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    batch = len(case.lens)
    pages = [-(-length // case.page) for length in case.lens]
    width = max(1, *pages) + 1
    num_blocks = sum(pages) + 3
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    block_table = torch.full((batch, width), 2147480000, dtype=torch.int32)
    block_table[:, 1::2] = -1
    k_cache = torch.full((num_blocks, case.page, case.kv_heads, case.head_dim), math.nan)
    first = 0
    for row, (length, used) in enumerate(zip(case.lens, pages, strict=True)):
        blocks = order[first : first + used]
        block_table[row, :used] = blocks
        tokens = torch.arange(length)
        values = torch.randn(length, case.kv_heads, case.head_dim, generator=generator)
        k_cache[blocks.long()[tokens // case.page], tokens % case.page] = values
        first += used
    q_shape = (batch, case.seq_len_q, case.heads, case.head_dim)
    visible_lens = None
    if case.visible is not None:
        visible_lens = torch.tensor(case.visible, dtype=torch.int32)
    return Inputs(
        q=(torch.randn(q_shape, generator=generator) * case.q_amplitude).to(dtype),
        k_cache=k_cache.to(dtype),
        block_table=block_table,
        cache_seqlens=torch.tensor(case.lens, dtype=torch.int32),
        head_dim_v=case.head_dim_v,
        softmax_scale=case.scale,
        causal=case.causal,
        visible_lens=visible_lens,
    )


def plan_of(inputs: Inputs, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A hand-written plan: the batch's blocks, 64 tokens each, dealt evenly over `num_parts`."""
    blocks = [-(-length // 64) for length in inputs.cache_seqlens.tolist()]
    # A place for each block, and one for each empty row, in order.
    places = [(row, block) for row, count in enumerate(blocks) for block in range(max(1, count))]
    share = max(1, -(-len(places) // num_parts))
    rows = []
    splits = [0] * len(blocks)
    for begin in range(0, num_parts * share, share):
        part = places[begin : begin + share]
        if not part:
            rows.append([-1, 0, 0, 0, 0, 0, 0, 0])
            continue
        (begin_row, begin_block), (end_row, end_block) = part[0], part[-1]
        end = min(end_block + 1, blocks[end_row])
        rows.append([begin_row, begin_block, end_row, end, splits[begin_row], 0, 0, 0])
        for row in range(begin_row, end_row + 1):
            splits[row] += 1
    ends = torch.tensor([0, *splits]).cumsum(0)
    return torch.tensor(rows, dtype=torch.int32), ends.to(torch.int32)
