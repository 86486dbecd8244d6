"""The command line: `flashmla demo | decode | check | bench | info`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. Ends with 0; 1: a failed check or wrong input; 2: wrong usage; 130: Ctrl-C."""
    try:
        import typer

        from flashmla.cli import bench, check, decode, demo, info
        from flashmla.cli.console import Failure, show_failure
    except ModuleNotFoundError as error:
        print(
            f"flashmla: the command line needs the package {error.name}: pip install {error.name}",
            file=sys.stderr,
        )
        sys.exit(1)

    app = typer.Typer(
        name="flashmla",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Multi-head latent attention over a paged key/value cache.",
    )
    app.callback()(info.options)
    app.command("demo")(demo.run)
    app.command("decode")(decode.run)
    app.command("check")(check.run)
    app.command("bench")(bench.run)
    app.command("info")(info.run)
    try:
        app()
    except Failure as failure:
        show_failure(failure)
        sys.exit(1)
    except (OSError, UnicodeEncodeError) as error:  # a full disk, an output that is ASCII
        show_failure(Failure(str(error)))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
