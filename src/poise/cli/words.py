"""The words that the Tab key offers.

A shell calls `poise` with `_POISE_COMPLETE` set, and gets the words that may stand at the cursor. Words that only a service
knows are asked of it for a moment; without one, or if anything goes wrong, nothing is offered and nothing is said. Which
words a parameter takes is in one table here, so that the modules of verbs know nothing of shells.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from copy import copy
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete, split_arg_string

from poise.cli.app import COMPLETION, Verbs, poise

PATIENCE = 1.0
"""Seconds for which a service is asked."""
MOST_JOBS = 200
"""Jobs that are offered."""
Words = Iterable[CompletionItem]
Completer = Callable[[str], Words]


class BashWords(BashComplete):
    """The words of bash: unlike Click's, whole ones, although bash breaks them at `:` and `=`."""

    source_template = """\
%(complete_func)s() {
    local line kind value
    COMPREPLY=()
    while IFS=$'\\t' read -r kind value; do
        case $kind in
            plain) COMPREPLY+=("$value"); [[ $value == *[=:+] ]] && compopt -o nospace ;;
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
        esac
    done < <(
        export POISE_LINE="${COMP_LINE:0:COMP_POINT}" POISE_BREAKS="$COMP_WORDBREAKS" %(complete_var)s=bash_complete
        "$1" 2>/dev/null
    )
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    @staticmethod
    def _check_version() -> None:
        """Nothing: whoever asks for the script of bash has one."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, and the one at it."""
        line = os.environ.get("POISE_LINE", "")
        words = split_arg_string(line)[1:]
        return (words[:-1], words[-1]) if words and not line[-1:].isspace() else (words, "")

    def complete(self) -> str:
        """What is offered, a line each; bash replaces only what stands behind the last character that breaks words."""
        args, incomplete = self.get_completion_args()
        breaks = set(os.environ.get("POISE_BREAKS", "")) & set(incomplete) & {":", "="}
        cut = 1 + max((incomplete.rindex(each) for each in breaks), default=-1)
        return "\n".join(f"{item.type}\t{item.value[cut:]}" for item in self.get_completions(args, incomplete))


class FishWords(FishComplete):
    """The words of fish: unlike Click's, also those with commas in them or in what is said of them."""

    source_template = """\
function %(complete_func)s
    set -l offered (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) \\
        %(prog_name)s 2>/dev/null)
    for each in $offered
        set -l parts (string split -m 1 \\t -- $each)
        switch $parts[1]
            case plain
                echo $parts[2]
            case file
                __fish_complete_path $parts[2]
            case dir
                __fish_complete_directories $parts[2]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""

    def format_completion(self, item: CompletionItem) -> str:
        """One of the words, and what is said of it."""
        return f"{item.type}\t{item.value}" + (f"\t{item.help}" if item.help else "")


SHELLS: dict[str, type[ShellComplete]] = {"bash": BashWords, "zsh": ZshComplete, "fish": FishWords}


def answer() -> int:
    """Print the words that a shell asks for; the exit code."""
    shell, _, wanted = os.environ[COMPLETION].partition("_")
    kind = SHELLS.get(shell)
    if kind is None or wanted != "complete":
        return 2
    verbs = CompletedVerbs(params=poise.params, callback=poise.callback, context_settings=poise.context_settings)
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        try:
            found = kind(verbs, {}, "poise", COMPLETION).complete()
        except Exception:  # whatever it is, it is nothing to say in the middle of a command line
            found = ""
    sys.stdout.write(found + "\n" if found else "")
    return 0


class CompletedVerbs(Verbs):
    """The verbs, with completers for their parameters."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        command = super().get_command(ctx, cmd_name)
        return None if command is None else completed(cmd_name, command)


class CompletedType(click.ParamType[Any]):
    """A type of a parameter, for which there are words to offer."""

    def __init__(self, kind: "click.ParamType[Any]", completer: Completer) -> None:
        self.name = kind.name
        self._kind = kind
        self._completer = completer

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """As the type itself does."""
        return self._kind.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The words that may stand there."""
        return [item for item in self._completer(incomplete) if item.type != "plain" or item.value.startswith(incomplete)]


def completed(verb: str, command: click.Command) -> click.Command:
    """A copy of a command, and of those below it, whose parameters have their completers."""
    found = copy(command)
    if isinstance(found, click.Group):
        found.commands = {name: completed(f"{verb} {name}", each) for name, each in found.commands.items()}
    found.params = [_completed(verb, each) for each in command.params]
    return found


def _completed(verb: str, parameter: click.Parameter) -> click.Parameter:
    completer = COMPLETERS.get(f"{verb} {parameter.name}") or COMPLETERS.get(parameter.name or "")
    if completer is None or isinstance(parameter.type, click.types.BoolParamType):
        return parameter
    found = copy(parameter)
    found.type = CompletedType(parameter.type, completer)
    return found


# Words that everybody knows. Each module is imported only when its words are asked for.


def files(incomplete: str) -> Words:
    """Any file: the shell knows them."""
    yield CompletionItem(incomplete, type="file")


def folders(incomplete: str) -> Words:
    """Any folder."""
    yield CompletionItem(incomplete, type="dir")


def traces(incomplete: str) -> Words:
    """A trace: a file, or synthetic:KNOBS."""
    yield CompletionItem("synthetic:")
    yield from files(incomplete)


def policy_names(_incomplete: str) -> Words:
    """The policies of the catalogue."""
    from poise.scheduler.policies.catalogue import POLICIES

    return [CompletionItem(name, help=policy.summary) for name, policy in POLICIES.items()]


def policy(incomplete: str) -> Words:
    """A policy with its parameters or combinators."""
    *before, last = incomplete.split(",")
    return _policies(before, last, may_begin=not before)


def several_policies(incomplete: str) -> Words:
    """Policies with commas in between, each with its parameters."""
    *before, last = incomplete.split(",")
    return _policies(before, last, may_begin=True)


def _policies(before: list[str], last: str, *, may_begin: bool) -> Iterator[CompletionItem]:
    """What may stand in the place of the last part; may_begin: another policy too."""
    from poise.scheduler.policies.catalogue import COMBINATORS, POLICIES

    written = "".join(f"{part}," for part in before)
    stem, is_open, _ = last.rpartition(":")
    name = stem if is_open else _open_policy(before)
    base = name.partition("+")[0]
    if base in POLICIES:
        given = {part.rpartition(":")[2].partition("=")[0] for part in before}
        for each in POLICIES[base].parameters:
            if each.name not in given:
                yield CompletionItem(f"{written}{stem}{is_open}{each.name}=", help=each.meaning)
    if is_open or not may_begin:
        return
    chosen, plus, _ = last.rpartition("+")
    if plus:
        yield from (CompletionItem(f"{written}{chosen}+{each}") for each in COMBINATORS)
    else:
        yield from (CompletionItem(f"{written}{each}", help=listing.summary) for each, listing in POLICIES.items())


def _open_policy(parts: list[str]) -> str:
    """The policy whose parameters may go on after these parts; "": none."""
    for part in reversed(parts):
        if ":" in part:
            return part.partition(":")[0]
        if "=" not in part:
            return ""
    return ""


def presets(_incomplete: str) -> Words:
    """The set-ups of published systems."""
    from poise.engine.assembly import PRESETS

    return map(CompletionItem, PRESETS)


def placements(_incomplete: str) -> Words:
    """The strategies of placement."""
    from poise.scheduler.placement.strategies import PLACEMENTS

    return map(CompletionItem, PLACEMENTS)


def trace_formats(_incomplete: str) -> Words:
    """The formats of traces."""
    from poise.lab.traces.registry import format_names

    return map(CompletionItem, format_names())


def _states(incomplete: str, groups: tuple[str, ...]) -> Words:
    from poise.service.wire.views import JobState

    written = incomplete.rpartition(",")[0]
    before = f"{written}," if written else ""
    states = [state.lower() for state in JobState if groups or not state.is_final]
    return [CompletionItem(before + word) for word in (*states, *groups)]


def states(incomplete: str) -> Words:
    """States of jobs, with commas in between."""
    return _states(incomplete, ("ended", "all"))


def live_states(incomplete: str) -> Words:
    """States of jobs that have not ended."""
    return _states(incomplete, ())


# Words that the service knows


@contextmanager
def asked() -> Iterator[Any]:
    """The running service, for a moment; any trouble with it ends the block."""
    from poise.service.client import Client

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        with Client.from_config(timeout=PATIENCE, patience=0.0) as client:
            yield client
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def jobs(incomplete: str) -> Words:
    """Jobs by id and by name, also those that have ended lately."""
    from poise.service.wire.views import JobState

    return _jobs(incomplete, tuple(JobState))


def live_jobs(incomplete: str) -> Words:
    """Jobs that have not ended."""
    return _jobs(incomplete, ())


def _jobs(incomplete: str, states: tuple[Any, ...]) -> Words:
    with asked() as client:
        rows = client.queue(states=states, limit=MOST_JOBS).jobs
        known = [(row.id, row.name, row.state) for row in rows]
        if incomplete and not incomplete.isdecimal():  # it may be behind those
            known += [(job.id, job.name, job.state) for job in client.called(incomplete).jobs]
    ids = {job: CompletionItem(job, help=f"{name} {state}") for job, name, state in known}
    by_name = {name: CompletionItem(name, help=f"{job} {state}") for job, name, state in reversed(known) if name not in ids}
    return [*ids.values(), *reversed(by_name.values())]


def apps(_incomplete: str) -> Words:
    """Apps of jobs that have not ended."""
    with asked() as client:
        rows = client.queue(limit=MOST_JOBS).jobs
    return map(CompletionItem, dict.fromkeys(row.app for row in rows if row.app))


def tenants(_incomplete: str) -> Words:
    """Tenants that have, or had, jobs."""
    with asked() as client:
        return [CompletionItem(each.tenant) for each in client.shares().tenants]


def nodes(_incomplete: str) -> Words:
    """Nodes."""
    with asked() as client:
        return [CompletionItem(each.name, help=each.state.value) for each in client.nodes().nodes]


def gpu_types(incomplete: str) -> Words:
    """GPU types of the nodes, with commas in between."""
    written = incomplete.rpartition(",")[0]
    before = f"{written}," if written else ""
    with asked() as client:
        return [CompletionItem(before + each) for each in dict.fromkeys(node.gpu_type for node in client.nodes().nodes)]


COMPLETERS: dict[str, Completer] = {
    "job": jobs, "jobs": jobs, "cancel jobs": live_jobs, "hold jobs": live_jobs, "release jobs": live_jobs,
    "after": jobs, "app": apps, "tenant": tenants, "drain names": nodes, "return names": nodes, "types": gpu_types,
    "states": states, "cancel states": live_states, "hold states": live_states, "release states": live_states,
    "policies name": policy_names, "policy": policy, "spec": policy, "policies": several_policies,
    "bench fidelity policies": policy, "preset": presets, "placement": placements, "trace_format": trace_formats,
    "format": trace_formats,
    "trace": traces, "source": traces, "submit file": files, "cwd": folders, "venv": folders, "env_file": files,
    "cluster": files, "throughputs": files, "true_throughputs": files,
}  # fmt: skip
"""What completes a parameter, by its name, or by verb and name; all others are completed by their types, or by nothing."""
