"""`poise new-policy`: a policy to begin with, its test and its page; `policy_files` says what is in them."""

import keyword
import re
import sys
from enum import StrEnum
from pathlib import Path
from shlex import quote

import click

from poise.cli.options import FOLDER, choice_of, examples, json_option, print_json
from poise.cli.policy_files import KINDS, PACKAGE, PAGE, TESTS
from poise.scheduler.model.errors import RequestError
from poise.scheduler.policies.catalogue import POLICIES

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


class PolicyKind(StrEnum):
    """What a policy answers with."""

    ORDER = "order"
    PLANNER = "planner"
    ALLOCATOR = "allocator"


@click.command(
    epilog=examples("poise new-policy heavy-first", "poise new-policy my-shares --kind allocator --dir policies --package")
)
@click.argument("name")
@click.option(
    "--kind",
    type=choice_of(PolicyKind),
    default=PolicyKind.ORDER.value,
    show_default=True,
    help="What it answers with: a rank for each job, a plan for all jobs, or shares of time.",
)
@click.option("--dir", "folder", type=FOLDER, help="Where to write.  [default: the current folder]")
@click.option(
    "--package", is_flag=True, help="Write a pyproject.toml too: once installed, the policy has a name of its own."
)
@json_option
def new_policy(name: str, kind: str, folder: Path | None, *, package: bool, as_json: bool) -> None:
    """Write a policy to begin with, its test and its page: NAME.py, test_NAME.py and NAME.md. Nothing is written over."""
    module = name.replace("-", "_")
    _check(name, module)
    chosen = KINDS[kind]
    words = {"NAME": name.replace("_", "-"), "MODULE": module, **chosen.words}
    texts = {f"{module}.py": chosen.policy, f"test_{module}.py": TESTS, f"{module}.md": PAGE}
    if package:
        texts["pyproject.toml"] = PACKAGE
    files = {(folder or Path()) / file: _filled(text, words) for file, text in texts.items()}
    for file in files:
        if file.exists():
            raise RequestError(f"{file} is there already; choose another name, or another folder with --dir")
    (folder or Path()).mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    spec = f"{module}:POLICY"
    steps = [] if folder is None else [f"cd {quote(str(folder))}"]
    steps += [
        f"poise check-policy {spec}",
        f"python -m pytest test_{module}.py",
        f"poise compare synthetic:jobs=200 --policies fifo,{spec} --cluster gpu:16",
    ]
    if package:
        steps.append(f"pip install -e . && poise policies {words['NAME']}")
    if as_json:
        print_json({"name": words["NAME"], "policy": spec, "files": [str(file) for file in files], "next": steps})
        return
    click.echo(f"wrote {', '.join(map(str, files))}")
    click.echo("next:")
    for step in steps:
        click.echo(f"  {step}")


def _check(name: str, module: str) -> None:
    """Refuse a name that no module or no policy can have."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name[:60]!r}: expected small letters, digits and single hyphens, e.g. deadline-first")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module == "poise":
        raise RequestError(f"{name!r} is the name of something in Python; choose another, e.g. {name}-first")
    if name.replace("_", "-") in POLICIES:
        raise RequestError(f"{name!r} is a policy of the catalogue; choose another name, e.g. my-{name}")


def _filled(text: str, words: dict[str, str]) -> str:
    """A template with its words, which stand between braces in capitals."""
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", value)
    return text
