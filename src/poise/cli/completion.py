"""`poise completion`: what makes the Tab key complete words of `poise`; which words is said in `words`."""

import click

from poise.cli.app import COMPLETION, poise
from poise.cli.options import json_option, print_json
from poise.cli.words import SHELLS

EPILOG = """\b
Examples:
  eval "$(poise completion bash)"              in ~/.bashrc
  eval "$(poise completion zsh)"               in ~/.zshrc, after compinit
  poise completion fish | source               in ~/.config/fish/config.fish
"""


@click.command(epilog=EPILOG)
@click.argument("shell", type=click.Choice([*SHELLS]))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print what makes the Tab key complete the words of `poise`, for a shell to read when it starts.

    It completes verbs, options, policies and their parameters, presets, formats and files; with a running service also jobs
    by id and name, apps, tenants, nodes and GPU types.
    """
    script = SHELLS[shell](poise, {}, "poise", COMPLETION).source().strip()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
