"""The demo: text from the paged model, checked token by token against the plain one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import flashmla
from flashmla.demo.model import Attention, LanguageModel, PagedModel, PlainModel, Planner
from flashmla.demo.tokenizer import Tokenizer

FOLDER = Path(__file__).parent
WEIGHTS = FOLDER / "weights.safetensors"
TOKENIZER = FOLDER / "tokenizer.json"
PROMPT = FOLDER / "prompt.txt"

# Two tokens are a tie when the plain model's scores of them differ by at most this share of its
# largest logit. Logits of the two models were seen to differ by up to 5e-7 and 1e-2 of it, and a
# comparison takes two.
TIE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Step:
    """One generated token."""

    text: str
    token: int
    plain_token: int
    logit_difference: float  # largest difference between the two models' logits
    tie: bool  # the tokens differ, and the plain model's logits of the two are equal in rounding


@dataclass
class Summary:
    """What a run did; filled while `generate` runs."""

    prompt_tokens: int = 0
    tokens: int = 0
    mismatches: int = 0  # tokens that differ and are no tie
    ties: int = 0
    max_logit_difference: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # of the paged model alone
    pages: int = 0
    cache_bytes: int = 0
    steps: list[Step] = field(default_factory=list)

    @property
    def all_equal(self) -> bool:
        """Whether every token is the plain model's; a tie is none of them."""
        return self.tokens > 0 and self.mismatches == 0 and self.ties == 0

    @property
    def tokens_per_second(self) -> float:
        decoded = self.tokens - 1  # the first token comes from the prefill
        return decoded / self.decode_seconds if decoded > 0 else 0.0


def _scores(logits: torch.Tensor, temperature: float, noise: torch.Tensor) -> torch.Tensor:
    """The next token has the most of this: its logit, and noise that makes it a draw."""
    return logits + temperature * noise


def judge(
    scores: torch.Tensor, plain_scores: torch.Tensor, rounding: float
) -> tuple[int, int, bool]:
    """The token of each, and whether they differ only by rounding, an absolute difference."""
    token, plain_token = int(scores.argmax()), int(plain_scores.argmax())
    gap = float(plain_scores[plain_token] - plain_scores[token])
    return token, plain_token, token != plain_token and gap <= rounding


@torch.inference_mode()
def generate(
    prompt: str,
    num_tokens: int,
    summary: Summary,
    *,
    temperature: float = 0.7,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    page_size: int = 64,
    device: torch.device | str = "cpu",
    weights: Path = WEIGHTS,
    attention: Attention = flashmla.flash_mla_with_kvcache,
    plan: Planner = flashmla.get_mla_metadata,
) -> Iterator[Step]:
    """Continues `prompt` with the paged model, beside the plain one on the same tokens.

    Args:
        prompt: any text, at least one character.
        num_tokens: tokens to generate, at least 1; with the prompt's at most the context length.
        summary: filled as the run goes.
        temperature: 0 for the likeliest token, else tokens are drawn with `seed`, by the same noise
            for both models.
        dtype: float32 or bfloat16, of both models.
        page_size: slots of a page of the cache, at most the context length.
        device: where both models run.
        weights: a file of `LanguageModel.save`.
        attention, plan: the functions under test.

    Raises:
        ValueError: an argument out of range; the message names it.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character")
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must be a number of 64 bits")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be finite and not negative")
    if dtype not in TIE:
        names = " or ".join(str(accepted).removeprefix("torch.") for accepted in TIE)
        raise ValueError(f"dtype is {dtype}; it must be {names}")
    model = LanguageModel.load(weights, dtype, device)
    tokenizer = Tokenizer.load(TOKENIZER)
    tokens = tokenizer.encode(prompt)
    limit = model.config.context_length
    if not 1 <= page_size <= limit:
        raise ValueError(
            f"page_size is {page_size}; it must be between 1 and the model's context length, "
            f"{limit}"
        )
    if len(tokens) + num_tokens > limit:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens and num_tokens is {num_tokens}; together they "
            f"must be at most the model's context length, {limit}"
        )

    paged = PagedModel(model, attention, plan, page_size)
    plain = PlainModel(model)
    summary.prompt_tokens = len(tokens)
    summary.cache_bytes = paged.cache.pools.nbytes
    generator = torch.Generator().manual_seed(seed)
    following = torch.tensor(tokens, device=device)
    written: list[int] = []
    shown = ""
    for index in range(num_tokens):
        start = time.perf_counter()
        logits = paged.append(following).float().cpu()  # the copy waits for the device
        elapsed = time.perf_counter() - start
        if index == 0:
            summary.prefill_seconds = elapsed
        else:
            summary.decode_seconds += elapsed
        plain_logits = plain.append(following).float().cpu()

        uniform = torch.rand(logits.shape, generator=generator).clamp_min(1e-20)
        noise = -(-uniform.log()).log()
        token, plain_token, tie = judge(
            _scores(logits, temperature, noise),
            _scores(plain_logits, temperature, noise),
            TIE[dtype] * float(plain_logits.abs().max()),
        )
        difference = float((logits - plain_logits).abs().max())
        # A token may end inside a character, so the text is what all tokens decode to.
        written.append(token)
        text = tokenizer.decode(written).rstrip("\ufffd")
        piece, shown = text[len(shown) :], text
        step = Step(piece, token, plain_token, difference, tie)
        summary.tokens += 1
        summary.ties += tie
        summary.mismatches += token != plain_token and not tie
        summary.max_logit_difference = max(summary.max_logit_difference, difference)
        summary.pages = paged.cache.pages
        summary.steps.append(step)
        yield step
        following = torch.tensor([token], device=device)
