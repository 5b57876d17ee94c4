"""The click group that holds the commands, one file each."""

from __future__ import annotations

import click

from gradquorum import __version__
from gradquorum.cli.demo import demo
from gradquorum.cli.serve import serve


@click.group(invoke_without_command=True)
@click.version_option(__version__, prog_name="gradquorum")
@click.pass_context
def gradquorum(context: click.Context) -> None:
    """Gather sparse gradients from many workers, drop the stale ones, wait for a quorum."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


gradquorum.add_command(demo)
gradquorum.add_command(serve)
