"""`flask handrail ...`: the command line of Handrail, with the application's configuration."""

from __future__ import annotations

import os
from typing import Final

import click
from flask import current_app
from flask.cli import with_appcontext

from handrail.errors import HandrailError
from handrail.integrations.flask import conf

#: Everything belongs to the command behind it, `--help` too.
_PASS_ON: Final = {"ignore_unknown_options": True, "help_option_names": []}


@click.command("handrail", context_settings=_PASS_ON, short_help="Workers, runs, approvals, ...")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@with_appcontext
def handrail(arguments: tuple[str, ...]) -> None:
    """Hand everything to `handrail`, whose exit code is that of `flask`."""
    from handrail.cli import app

    try:
        settings = conf.read(current_app)
    except HandrailError as error:
        click.echo(f"error[{error.code}]: {error}", err=True)
        raise SystemExit(2) from None
    os.environ.update(settings.to_environment())
    app(args=[*arguments], prog_name="flask handrail")
