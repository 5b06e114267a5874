"""The environment of the shell that submits, as jobs get it: all of it but what does not belong to a job, or what is named.

What never comes along unless it is named has lost its meaning by the time the job runs, or is decided where it runs:

- what belongs to the terminal and the session (TERM, DISPLAY, SSH_AUTH_SOCK, TMUX, PWD …): both are over by then;
- what belongs to the account and the machine (HOME, USER, SHELL, TMPDIR): a job may run as another user, who has others;
- the virtual environment (VIRTUAL_ENV, CONDA_*, its part of PATH): a request says itself in which one its job runs;
- what says which GPUs and which rank a process has (CUDA_VISIBLE_DEVICES, RANK, SLURM_* …): that of the shell, if there is
  any, is about another run, by Poise or by another launcher.

What says where things are on this machine (PATH, LD_LIBRARY_PATH …) comes along only to a service of this machine, and not
into a container, which has its own. What begins with POISE_, the token among it, never leaves the client, named or not.

Values that cannot be handed over (not UTF-8, or too long) and the largest of those that are too much together are left out
with a note, paths last, unless the export was asked for: then that is an error.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.venvs import programs
from poise.service.client.submission import ACTIVE, active_environment
from poise.service.wire.environments import sha256_of, text_of
from poise.service.wire.request import (
    EXPECTED_EXPORT,
    EXPORT_ALL,
    EXPORT_NONE,
    MOST_ENVIRONMENT,
    MOST_VARIABLES,
    OWN_PREFIX,
    VARIABLE,
    JobRequest,
)

MOST_BYTES = (128 << 10) - 1  # of a variable with its name: execve(2) refuses more
MOST_NAMED = 5  # variables that a note names
ADVICE = (
    f"a job takes {MOST_VARIABLES} variables with {MOST_ENVIRONMENT:,} characters of UTF-8 in all: name what it needs "
    "(--export NAME,NAME), or take nothing along (--export none)"
)
_KINDS = (EXPORT_ALL, EXPORT_NONE)
_SESSION = (
    "TERM", "TERM_(PROGRAM|PROGRAM_VERSION|SESSION_ID)", "TERMCAP", "COLORTERM", "COLUMNS", "LINES", "LS_?COLORS", "PS[0-4]",
    "PROMPT_COMMAND", "CLICOLOR(_FORCE)?", "FORCE_COLOR", "(GIT_)?PAGER", "MPLBACKEND", "JPY_.*", "VSCODE_.*", "VTE_VERSION",
    "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "DBUS_.*", "XDG_RUNTIME_DIR", "XDG_(SEAT|SESSION)(_.*)?",
    "XDG_VTNR", "XDG_CURRENT_DESKTOP", "DESKTOP_SESSION", "SSH_.*", "GPG_(AGENT_INFO|TTY)", "SUDO_.*", "TMUX(_PANE)?", "STY",
    "INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "LISTEN_(FDS|FDNAMES|PID)", "SYSTEMD_EXEC_PID", "MANAGERPID",
    "_", "PWD", "OLDPWD", "SHLVL", "HIST(FILE|SIZE|FILESIZE|CONTROL|IGNORE|TIMEFORMAT)", "BASH_FUNC_.*",
)  # fmt: skip
"""Of terminals, desktops, notebooks and the shell itself."""
_ACCOUNT = ("HOME", "USER", "USERNAME", "LOGNAME", "UID", "SHELL", "MAIL", "HOST(NAME)?", "TMPDIR", "TE?MP")
_VENV = (*ACTIVE, "PYTHONHOME", "VIRTUAL_ENV_.*", "CONDA_.*", "_CE_.*")
_RUN = (
    "[A-Z_]*VISIBLE_DEVICES", "((LOCAL|GROUP|ROLE|NODE)_)?RANK", "((LOCAL|GROUP|ROLE)_)?WORLD_SIZE", "ROLE_NAME",
    "MASTER_(ADDR|PORT)", "TORCHELASTIC_.*", "OMPI_.*", "PMIX?_.*", "SLURMD?_.*", "SBATCH_.*", "KUBERNETES_.*", "RAY_.*",
    "ARRAY_(INDEX|COUNT)",
)  # fmt: skip
_PLACE = (
    "PATH", "LD_.*", "PYTHONPATH", "LIBRARY_PATH", "CPATH", "(C|CPLUS|OBJC)_INCLUDE_PATH", "PKG_CONFIG_PATH",
    "CMAKE_PREFIX_PATH", "ACLOCAL_PATH", "MANPATH", "INFOPATH", "CUDA_(HOME|PATH|ROOT)", "JAVA_HOME", "GOPATH", "GOROOT",
    "XDG_(DATA|CONFIG)_DIRS", "XDG_(CACHE|CONFIG|DATA|STATE|BIN)_HOME", "MODULE(PATH|SHOME)", "MODULES_.*", "LOADEDMODULES",
    "_LMFILES_", "LMOD_.*", "BASH_ENV", "ENV", "SSL_CERT_(FILE|DIR)", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NIX_.*",
    "GUIX_.*",
)  # fmt: skip
_is_never = re.compile("|".join((*_SESSION, *_ACCOUNT, *_VENV, *_RUN, f"{OWN_PREFIX}.*"))).fullmatch
_is_of_place = re.compile("|".join(_PLACE)).fullmatch
_is_name = re.compile(VARIABLE).fullmatch


@dataclass(frozen=True, slots=True)
class Exported:
    """Requests as they are sent, the environments that come with them, and what their owner should know of that."""

    requests: tuple[JobRequest, ...]
    environments: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def exported(requests: Sequence[JobRequest], environ: Mapping[str, str], *, is_here: bool) -> Exported:
    """Take what the jobs get of an environment. RequestError: what was asked for cannot be had.

    is_here   the service is on this machine
    """
    alike: dict[tuple[str, bool, bool], list[int]] = {}
    for place, each in enumerate(requests):
        alike.setdefault((each.export, each.image is None and is_here, "export" in each.model_fields_set), []).append(place)
    found, environments, notes = list(requests), [], []
    for (export, has_places, is_asked), members in alike.items():
        given = [requests[place].env for place in members]
        kept, left = _fitting(_taken(export, environ, has_places=has_places), given)
        if left and is_asked:
            raise RequestError(f"export: {_listed(left)} cannot come along; {ADVICE}")
        if left:
            notes.append(f"not exported: {_listed(left)}; {ADVICE}")
        for place in members:
            sha256 = sha256_of(text_of(kept)) if kept else None
            found[place] = requests[place].model_copy(update={"exported": sha256})
        if kept:
            environments.append(kept)
    return Exported(tuple(found), tuple(environments), tuple(notes))


def _taken(export: str, environ: Mapping[str, str], *, has_places: bool) -> dict[str, str]:
    if export == EXPORT_NONE:
        return {}
    return _whole(environ, has_places=has_places) if export == EXPORT_ALL else _named(export, environ)


def _whole(environ: Mapping[str, str], *, has_places: bool) -> dict[str, str]:
    """All of an environment that makes sense in a job. `has_places`: what says where things are makes sense there too."""
    found = {
        name: value
        for name, value in environ.items()
        if _is_name(name) and not _is_never(name) and (has_places or not _is_of_place(name))
    }
    active = active_environment(environ)
    if active is not None and "PATH" in found:
        folders = found["PATH"].split(os.pathsep)
        found["PATH"] = os.pathsep.join(each for each in folders if os.path.abspath(each) != programs(active))
    return found


def _named(export: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are named, whatever they are."""
    found = {}
    for name in export.split(","):
        if name.startswith(OWN_PREFIX):
            raise RequestError(f"export: {name}: names that begin with {OWN_PREFIX} are Poise's own")
        if name not in environ:
            near = get_close_matches(name, [*_KINDS, *environ], n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected {EXPECTED_EXPORT}"
            raise RequestError(f"export: {name} is not set in this shell; {hint}")
        found[name] = environ[name]
    return found


def _fitting(taken: Mapping[str, str], given: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """What of the variables can be handed over beside what each job is given, and what cannot, by name, with the reason."""
    left = {name: why for name, value in taken.items() if (why := _unfit(name, value)) is not None}
    kept = {name: value for name, value in taken.items() if name not in left}
    used = [(len(each), _size(each)) for each in given]
    many, large = MOST_VARIABLES - max(count for count, _ in used), MOST_ENVIRONMENT - max(size for _, size in used)
    size = _size(kept)
    for name in sorted(kept, key=lambda each: (_is_of_place(each) is not None, -len(kept[each]), each)):  # PATH comes last
        if size <= large and len(kept) <= many:
            break
        length = len(name) + len(kept.pop(name))
        size -= length
        left[name] = f"{length:,} characters"
    return kept, left


def _unfit(name: str, value: str) -> str | None:
    try:
        size = len(f"{name}={value}".encode())
    except UnicodeEncodeError:
        return "not UTF-8"
    return f"{size:,} bytes" if size > MOST_BYTES else None


def _size(variables: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in variables.items())


def _listed(left: Mapping[str, str]) -> str:
    """Names with reasons, the first few."""
    more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
    return ", ".join(f"{name} ({why})" for name, why in list(left.items())[:MOST_NAMED]) + more
