"""`flashmla demo`: text from a trained model over a paged cache, checked token by token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from flashmla import _library
from flashmla.cli.console import Failure, console, require_support
from flashmla.demo.generate import PROMPT, Summary, generate


def _show(summary: Summary, elapsed: float) -> None:
    """What the run did, in `elapsed` seconds, and each token that is not the plain model's."""
    console.print("\n")
    console.print(
        f"{summary.tokens} tokens after a prompt of {summary.prompt_tokens}: "
        f"[bold]{summary.tokens_per_second:.0f} tokens/s[/] "
        f"(prefill {summary.prefill_seconds * 1e3:.0f} ms; {elapsed:.1f} s with the check), "
        f"{summary.pages} pages of a cache of {summary.cache_bytes / 1e6:.1f} MB"
    )
    equal = summary.tokens - summary.mismatches - summary.ties
    ties = f", {summary.ties} ties within rounding" if summary.ties else ""
    colour = "green" if summary.mismatches == 0 else "red"
    console.print(
        f"[bold {colour}]{equal} of {summary.tokens} tokens equal the plain PyTorch model's{ties}"
        f"[/]; largest difference of a logit {summary.max_logit_difference:.1e}"
    )
    for index, step in enumerate(summary.steps):
        if step.token != step.plain_token:
            kind = "a tie within rounding" if step.tie else "a mismatch"
            console.print(
                f"  token {index}: {step.token}, the plain model's is {step.plain_token}: {kind}"
            )


def run(
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file to continue.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the draw of tokens.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    page_size: Annotated[int, typer.Option(help="Slots of a page of the cache.")] = 64,
) -> None:
    """Write text with a small DeepSeek-architecture model and check every token.

    The model's attention runs through flash_mla_with_kvcache over a paged cache, in absorbed form.
    A plain PyTorch model with the same weights, unabsorbed and unpaged, runs beside it; each token
    must be the one that it would have written.
    """
    require_support("cpu")
    # The model is so small that waking a second thread costs more than it gives, and on a busy
    # machine threads that wait for each other take minutes.
    torch.set_num_threads(1)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise Failure(f"--dtype is {dtype}; it must be float32 or bfloat16")
    if prompt is not None and prompt_file is not None:
        raise Failure("--prompt and --prompt-file are both given; give one")
    if prompt is None:
        path = prompt_file or PROMPT
        try:
            prompt = path.read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(f"cannot read the prompt from {path}: {error}") from None

    summary = Summary()
    begin = time.perf_counter()
    console.print(
        f"[dim]7.5M parameters, {dtype}, pages of {page_size}, {torch.get_num_threads()} threads, "
        f"{_library.cpu_features()}[/]"
    )
    console.print(prompt, style="bold", end="", markup=False, soft_wrap=True)
    try:
        for step in generate(
            prompt,
            tokens,
            summary,
            temperature=temperature,
            seed=seed,
            dtype=dtypes[dtype],
            page_size=page_size,
        ):
            console.print(step.text, end="", markup=False, soft_wrap=True)
    except ValueError as error:
        console.print()
        raise Failure(str(error)) from None
    elapsed = time.perf_counter() - begin

    _show(summary, elapsed)
    if summary.mismatches:
        raise Failure(f"{summary.mismatches} tokens differ from the plain model's")
