"""`python -m tests.broken_streams`: runs many commands with standard streams that are gone, closed or full.

All modules of commands are imported once, and each command runs in a process that is forked off. Standard input has a JSON
list of [words, how standard output is, how standard error is]; the answer is a JSON list of [exit code, standard error].
"""

import json
import os
import sys
from importlib import import_module

from poise.cli import app


def _put(number: int, how: str, held: int) -> None:
    """Make a standard stream of this process as it is called: gone, closed, full, nowhere or held (by the parent)."""
    if how == "gone":
        out, into = os.pipe()
        os.close(out)
        os.dup2(into, number)
        os.close(into)
    elif how == "closed":
        os.close(number)
        name = {1: "stdout", 2: "stderr"}[number]
        setattr(sys, name, None)  # as Python itself has it then
        setattr(sys, f"__{name}__", None)
    else:
        target = held if how == "held" else os.open({"full": "/dev/full", "nowhere": os.devnull}[how], os.O_WRONLY)
        os.dup2(target, number)


def outcome(words: list[str], out: str, err: str) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _put(1, out, writing)
        _put(2, err, writing)
        os.close(writing)
        sys.argv = ["poise", *words]
        try:
            app.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            for stream in (sys.stdout, sys.stderr):  # what Python does when it ends
                try:
                    if stream is not None:
                        stream.flush()
                except OSError:
                    code = 120
            os._exit(code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(99)
        os._exit(98)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


if __name__ == "__main__":
    for verb in app.VERBS.values():
        import_module(f"poise.cli.{verb.module}")
    json.dump([outcome(*case) for case in json.load(sys.stdin)], sys.stdout)
