"""`flashmla check`: every kernel that this machine can run, against float64."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.progress import track
from rich.table import Table

from flashmla import _library, cases, reference
from flashmla.cli.console import Failure, console, errors, kernels, require_support


def _run_case(case: cases.Case, kernel: _library.Kernel) -> tuple[float, float] | None:
    """The largest errors of out and lse over the plans; None where the kernel declines the case."""
    inputs = cases.make_inputs(case, kernel.dtype)
    moved = inputs.to(kernel.device_type)
    plans = [cases.plan_of(inputs, parts) for parts in case.parts]
    plans.append(torch.ops.flashmla.get_mla_metadata(moved.cache_seqlens, *moved.plan_heads()))
    results = []
    for plan in plans:
        try:
            results.append(
                torch.ops.flashmla.decode(
                    moved.q,
                    moved.k_cache,
                    moved.head_dim_v,
                    moved.cache_seqlens,
                    moved.block_table,
                    moved.softmax_scale,
                    moved.causal,
                    *(tensor.to(kernel.device_type) for tensor in plan),
                    moved.visible_lens,
                    kernel.index,
                )
            )
        except RuntimeError as error:
            # A kernel of few shapes declines the others by its own name.
            if str(error).startswith(f"kernel {kernel.name} "):
                return None
            raise
    expected = inputs.expected()
    errors_of = [reference.errors(out.cpu(), lse.cpu(), *expected) for out, lse in results]
    return max(out for out, _ in errors_of), max(lse for _, lse in errors_of)


def limits(case: cases.Case, dtype: torch.dtype) -> reference.Tolerance:
    """The bounds of the dtype, widened where large scores carry fewer digits after the point."""
    bound = reference.TOLERANCES[dtype]
    spread = case.q_amplitude * (case.scale or case.head_dim**-0.5) * case.head_dim**0.5
    if spread <= 2:
        return bound
    # Scores of magnitude m have an ulp of about m * 2^-23, and so an lse; out follows its weights.
    magnitude = 8 * spread
    lse = bound.lse_absolute + magnitude * 2.0**-20
    return reference.Tolerance(bound.out_relative + magnitude * 2.0**-18, lse)


def run(
    kernel: Annotated[
        str | None, typer.Option(help="Only kernels whose name contains this.")
    ] = None,
    suite: Annotated[str, typer.Option(help="dense, edge or all.")] = "all",
) -> None:
    """Check the kernels of this machine against a float64 evaluation."""
    require_support("cpu")
    if suite not in ("dense", "edge", "all"):
        raise Failure(f"--suite is {suite}; it must be dense, edge or all")
    chosen = [k for k in kernels() if kernel is None or kernel in k.name]
    if not chosen:
        names = ", ".join(k.name for k in kernels())
        raise Failure(f"no kernel's name contains {kernel!r}; there are {names}")
    todo = [
        case for name in ("dense", "edge") if suite in (name, "all") for case in cases.load(name)
    ]

    table = Table("kernel", "cases", "worst out", "bound", "worst lse", "verdict", box=None)
    failures = []
    usable = [k for k in chosen if k.usable]
    work = [(k, case) for k in usable for case in todo]
    worst: dict[str, list[float]] = {k.name: [0.0, 0.0] for k in usable}
    checked = {k.name: 0 for k in usable}
    for k, case in track(work, "checking", console=errors, transient=True):
        found = _run_case(case, k)
        if found is None:
            continue
        checked[k.name] += 1
        out_error, lse_error = found
        bound = limits(case, k.dtype)
        if not (out_error <= bound.out_relative and lse_error <= bound.lse_absolute):
            failures.append(
                f"{k.name}, case {case.name}: out {out_error:.1e} (bound "
                f"{bound.out_relative:.1e}), lse {lse_error:.1e} (bound {bound.lse_absolute:.1e})"
            )
        if bound == reference.TOLERANCES[k.dtype]:
            worst[k.name] = [max(worst[k.name][0], out_error), max(worst[k.name][1], lse_error)]
    for k in chosen:
        if not k.usable:
            table.add_row(k.name, "-", "", "", "", "[dim]not usable here[/]")
            continue
        bad = any(text.startswith(k.name + ",") for text in failures)
        table.add_row(
            k.name,
            str(checked[k.name]),
            f"{worst[k.name][0]:.1e}",
            f"{reference.TOLERANCES[k.dtype].out_relative:.0e}",
            f"{worst[k.name][1]:.1e}",
            "[red]wrong[/]" if bad else "[green]right[/]",
        )
    console.print(table)
    for text in failures:
        console.print(f"[red]{text}[/]")
    if failures:
        raise Failure(f"{len(failures)} of {sum(checked.values())} checks failed")
