"""The command line: `flashmla demo | decode | check | bench | info`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point. Errors of the user's making end in one line and status 1 or 2."""
    # Before torch starts its threads: what is printed should not depend on a spinning pool.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import typer

    from flashmla.cli import bench, check, decode, demo, info
    from flashmla.cli.console import Failure, errors

    app = typer.Typer(
        name="flashmla",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Multi-head latent attention over a paged key/value cache.",
    )
    app.command("demo")(demo.run)
    app.command("decode")(decode.run)
    app.command("check")(check.run)
    app.command("bench")(bench.run)
    app.command("info")(info.run)
    try:
        app()
    except Failure as failure:
        errors.print(f"[bold red]flashmla:[/] {failure}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
