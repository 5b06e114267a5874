"""Whatever is wrong with a request: exit code 2, one clear line on stderr, nothing on stdout, no traceback, no delay."""

import json
import os
import subprocess
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import monotonic

import pytest
from tests.shell import COMMAND, PATIENCE, Said, a_row, a_trace, poise

GOOD = json.dumps(a_row("a")).encode() + b"\n"
HEADER = b"job,submitted,gpus,duration\n"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a folder of its own with a good trace in it, and stands there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_bytes(GOOD)


def row(**changes: object) -> bytes:
    """A good row but for these values; raw text so that NaN and the like can be written."""
    text = json.dumps(a_row("a") | changes)
    return text.encode() + b"\n"


TRACES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected at least one job, got an empty file"),
    "blank lines": (b"\n\n \n", "expected at least one job, got nothing but blanks"),
    "header only": (HEADER, "expected at least one job, got none"),
    "no format of ours": (b"lorem ipsum dolor\n", "expected a trace in a known format (poise, gavel,"),
    "binary": (bytes(range(256)), "expected a trace in a known format"),
    "not UTF-8": (HEADER + b"\xff\xfe,0,1,5\n", ":2: "),
    "an unknown column": (b"job,submitted,gpus,duraton\na,0,1,5\n", "got 'duraton'; did you mean duration?"),
    "a row too short": (HEADER + b"a,0,1\n", ":2: expected 4 cells, as in the header, got 3"),
    "negative duration": (row(duration=-5), ":1: duration: expected a number of at least 0, got -5"),
    "absent duration": (
        b'{"job": "a", "submitted": 0, "gpus": 1}\n',
        ":1: duration: expected seconds, or steps",
    ),
    "absent gpus": (b'{"job": "a", "submitted": 0, "duration": 1}\n', ":1: gpus: expected a value, got nothing"),
    "NaN duration": (row(duration=float("nan")), ":1: "),
    "infinite submission": (row(submitted=float("inf")), ":1: "),
    "overflowing duration": (b'{"job": "a", "submitted": 0, "gpus": 1, "duration": 1e999}\n', ":1: "),
    "zero gpus": (row(gpus=0), ":1: gpus: expected a whole number from 1 to 1,000,000, got 0"),
    "too many gpus": (row(gpus=10**7), ":1: gpus: expected a whole number from 1 to 1,000,000, got 10000000"),
    "a number with a thousand digits": (row(gpus=10**1000), ":1: gpus: "),
    "a number that is a word": (row(submitted="soon"), ":1: submitted: expected a number, got 'soon'"),
    "a list for a number": (row(duration=[1]), ":1: duration: expected a number, got a list"),
    "the same job twice": (row() + row(), ":2: expected a new job id, got 'a', as on line 1"),
    "brackets without end": (b'{"job": ' + b"[" * 100_000 + b"\n", ":1: "),
    "a line without end": (b'{"job": "' + b"x" * (2 << 20), ":1: expected lines of at most 1,048,576 bytes"),
    "more seconds than there are": (row(duration=1e300), "expected at most 1e+15 seconds, got 1e+300 GPU-seconds of work"),
    "submitted when nobody is left": (row(submitted=1e300), "expected at most 1e+15 seconds"),
    "steps of an unknown model": (
        row(duration=None, steps=10, model="resnet51"),
        "job 'a': the throughput table 'shipped' does not know model 'resnet51' (nearest: ResNet50, ",
    ),
    "no micro-batches": (
        row(micro_batches=0),
        ":1: micro_batches: expected a whole number from 1 to 1,000,000, got 0",
    ),
    "a micro-batch and a half": (
        row(micro_batches=1.5),
        ":1: micro_batches: expected a whole number from 1 to 1,000,000, got 1.5",
    ),
    "bounds beside micro-batches": (row(micro_batches=8, max_gpus=2), ":1: max_gpus: expected nothing beside micro_batches"),
    "sync without micro-batches": (row(sync=0.5), ":1: sync: expected nothing where no micro_batches are given, got 0.5"),
    "negative sync": (row(micro_batches=8, sync=-1), ":1: sync: expected a number of at least 0, got -1"),
    "sync as long as a step": (
        row(micro_batches=8, sync=1),
        "job 'a': sync: a step takes 1 s on 'gpu', of which 1 s of synchronisation leave none to compute; give less",
    ),
    "no GPU type": (row(gpu_types=[]), ":1: gpu_types: names no GPU type; leave it out for any"),
    "steps of no model": (row(duration=None, steps=10), "job 'a' states its work in steps but names no model"),
}


@pytest.mark.parametrize("what", TRACES)
def test_a_bad_trace_is_refused(what: str, tmp_path: Path) -> None:
    content, want = TRACES[what]
    (tmp_path / "bad").write_bytes(content)
    assert want in poise("simulate", "bad").refusal
    assert poise("compare", "bad", "--policies", "fifo,srtf").refusal == poise("simulate", "bad").refusal
    assert want in poise("simulate", "-", stdin=content).refusal


@pytest.mark.parametrize("micro_batches", [None, 8])
def test_a_job_of_types_that_are_not_there_is_rejected_by_name_and_the_others_run(
    micro_batches: int | None, tmp_path: Path
) -> None:
    """The request is right, though this job cannot run: a note on stderr, and the run goes on."""
    a_trace(tmp_path, a_row("a"), a_row("b", gpu_types=["a100", "h100"], micro_batches=micro_batches))
    said = poise("simulate", "trace.jsonl", "--cluster", "v100:4,k80:4", "--json")
    assert (said.json["finished"], said.json["rejected"]) == (1, 1)
    assert said.err == "note: job 'b' was rejected: it asks for a100 or h100; the cluster has v100, k80\n"
    assert poise("simulate", "trace.jsonl", "--cluster", "v100:4", "--quiet").err == ""


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "expected at least one trace in a known format, got none" in poise("simulate", "folder").refusal
    (tmp_path / "folder" / "readme").write_text("nothing here")
    assert "expected at least one trace in a known format, got none" in poise("simulate", "folder").refusal


REQUESTS: dict[str, tuple[tuple[str, ...], str]] = {
    "verb": (("simulat", "good.jsonl"), "unknown command 'simulat'; did you mean simulate?"),
    "verb like none": (
        ("xyzzy",),
        "unknown command 'xyzzy'; known: agent, analyze, audit, bench, cancel, check-policy, compare, completion, demo",
    ),
    "no trace": (("simulate",), "Missing argument 'TRACE'. (see poise simulate --help)"),
    "no policies": (("compare", "good.jsonl"), "Missing option '--policies'. (see poise compare --help)"),
    "two traces": (("simulate", "good.jsonl", "good.jsonl"), "unexpected extra argument"),
    "trace that is not there": (("simulate", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
    "trace of no name": (("simulate", ""), "'': no such file"),
    "option": (("simulate", "good.jsonl", "--polcy", "fifo"), "No such option '--polcy'. Did you mean '--policy'?"),
    "option without a value": (("simulate", "good.jsonl", "--policy"), "'--policy' requires an argument"),
    "format": (("simulate", "good.jsonl", "--format", "gavle"), "unknown trace format 'gavle'; did you mean gavel"),
    "format that it is not": (
        ("simulate", "good.jsonl", "--format", "itp"),
        "good.jsonl:1: expected a header with",
    ),
    "policy": (("simulate", "good.jsonl", "--policy", "tiresia"), "unknown policy 'tiresia'; did you mean tiresias or"),
    "no policy": (("simulate", "good.jsonl", "--policy", ""), "unknown policy ''; known: allox, ffdl, fifo, "),
    "policy in the catalogue": (("policies", "strife"), "unknown policy 'strife'; did you mean stride"),
    "parameter": (
        ("simulate", "good.jsonl", "--policy", "tiresias:limit=3"),
        "unknown parameter of tiresias 'limit'; did you mean limits",
    ),
    "parameter of a policy that has none": (
        ("simulate", "good.jsonl", "--policy", "fifo:quantum=3"),
        "unknown parameter of fifo 'quantum'; known: (it takes none)",
    ),
    "parameter without a value": (
        ("simulate", "good.jsonl", "--policy", "tiresias:limits"),
        "write each parameter once, as limits=VALUE",
    ),
    "parameter given twice": (
        ("simulate", "good.jsonl", "--policy", "tiresias:promote=1,promote=2"),
        "write each parameter once, as promote=VALUE",
    ),
    "parameter out of range": (
        ("simulate", "good.jsonl", "--policy", "tiresias:limits=9/3"),
        "limits='9/3': expected rising limits, e.g. 3250/7200",
    ),
    "parameter that is no number": (("simulate", "good.jsonl", "--policy", "stride:quantum=x"), "quantum='x': "),
    "combinator": (
        ("simulate", "good.jsonl", "--policy", "fifo+agnostik"),
        "unknown combinator 'agnostik'; did you mean agnostic?",
    ),
    "combinator that does not apply": (("simulate", "good.jsonl", "--policy", "stride+stable"), "+stable applies to orders"),
    "placement": (
        ("simulate", "good.jsonl", "--placement", "best-fitt"),
        "unknown placement 'best-fitt'; did you mean best-fit?",
    ),
    "preset": (("simulate", "good.jsonl", "--preset", "gavl"), "unknown preset 'gavl'; did you mean gavel"),
    "cadence": (("simulate", "good.jsonl", "--cadence", "event"), "'event' is not one of 'rounds', 'events', 'both'"),
    "fairness": (("simulate", "good.jsonl", "--fairness", "user"), "'user' is not one of 'job', 'tenant'"),
    "load of nothing": (("simulate", "good.jsonl", "--load", "0"), "--load: expected a finite number above 0, got 0.0"),
    "negative load": (("simulate", "good.jsonl", "--load", "-1"), "--load: expected a finite number above 0, got -1.0"),
    "NaN load": (("simulate", "good.jsonl", "--load", "nan"), "--load: expected a finite number above 0, got nan"),
    "load in words": (("simulate", "good.jsonl", "--load", "heavy"), "Invalid value for '--load'"),
    "no jobs": (("simulate", "good.jsonl", "--jobs", "0"), "Invalid value for '--jobs': 0 is not in the range x>=1."),
    "half a job": (("simulate", "good.jsonl", "--jobs", "1.5"), "Invalid value for '--jobs'"),
    "negative seed": (("simulate", "good.jsonl", "--seed", "-1"), "Invalid value for '--seed'"),
    "a seed of many digits": (("simulate", "good.jsonl", "--seed", "x" * 5000), "Invalid value for '--seed': 'xxx"),
    "negative retries": (("simulate", "good.jsonl", "--retries", "-1"), "Invalid value for '--retries'"),
    "an unknown way to retry": (("simulate", "good.jsonl", "--retry", "luck"), "'luck' is not one of 'count', 'cause'"),
    "negative back-off": (("simulate", "good.jsonl", "--backoff", "-1"), "Invalid value for '--backoff'"),
    "negative wait for locality": (("simulate", "good.jsonl", "--packed-wait", "-1"), "Invalid value for '--packed-wait'"),
    "endless wait for a rack": (("simulate", "good.jsonl", "--rack-wait", "inf"), "Invalid value for '--rack-wait'"),
    "defragmentation in words": (("simulate", "good.jsonl", "--defragment", "often"), "Invalid value for '--defragment'"),
    "trials of no time": (
        ("simulate", "good.jsonl", "--validation-pool", "1", "--validation-time", "0"),
        "waits for locality, defragmentation, validation and back-off are finite and not negative",
    ),
    "negative pool": (("simulate", "good.jsonl", "--validation-pool", "-1"), "Invalid value for '--validation-pool'"),
    "a pool of everything": (
        ("simulate", "good.jsonl", "--cluster", "gpu:4", "--validation-pool", "4"),
        "a validation pool of 4 GPUs leaves none of 4 for the jobs",
    ),
    "micro-batches of none": (("simulate", "good.jsonl", "--micro-batches", "0"), "Invalid value for '--micro-batches'"),
    "micro-batches in parts": (("simulate", "good.jsonl", "--micro-batches", "1.5"), "Invalid value for '--micro-batches'"),
    "micro-batches beyond number": (
        ("simulate", "good.jsonl", "--micro-batches", "1000001"),
        "--micro-batches: expected at most 1,000,000 a job, got 1,000,001 for job 'a'",
    ),
    "micro-batches of elastic jobs": (
        ("simulate", "good.jsonl", "--micro-batches", "8", "--elastic"),
        "--elastic and --micro-batches say different things of the same jobs; give one of the two",
    ),
    "round of nothing": (("simulate", "good.jsonl", "--round", "0"), "--round: expected at least 0.001 seconds, got 0.0"),
    "round shorter than clocks tell": (("simulate", "good.jsonl", "--round", "1e-300"), "--round: expected at least 0.001"),
    "throughputs that are not there": (("simulate", "good.jsonl", "--throughputs", "none.csv"), "none.csv: cannot read"),
    "throughputs that are none": (("simulate", "good.jsonl", "--true-throughputs", "good.jsonl"), "good.jsonl"),
    "per-job file of no kind": (
        ("simulate", "good.jsonl", "--per-job", "rows.txt"),
        "--per-job rows.txt: expected a file that ends in .csv or .json",
    ),
    "knob": (("simulate", "synthetic:job=9"), "unknown knob of a synthetic trace 'job'; did you mean jobs"),
    "knob without a value": (("simulate", "synthetic:jobs"), "synthetic: expected knob=value, got 'jobs'"),
    "value of a knob": (("simulate", "synthetic:jobs=0"), "synthetic:jobs: expected a whole number from 1 to"),
    "fault parameter": (
        ("simulate", "good.jsonl", "--faults", "mbtf=3d"),
        "unknown fault parameter 'mbtf'; did you mean",
    ),
    "drain of no node": (("simulate", "good.jsonl", "--drain", "nowhere@1h..2h"), "unknown node 'nowhere'"),
    "drain without an end": (
        ("simulate", "good.jsonl", "--drain", "gpu-0@1h"),
        "expected NODE@FROM..UNTIL",
    ),
    "fault file that is not there": (("simulate", "good.jsonl", "--faults", "none"), "none: No such file or directory"),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_a_wrong_request_is_refused(what: str) -> None:
    words, want = REQUESTS[what]
    assert want in poise(*words).refusal


DURATIONS = ("--round", "--recompute", "--restart-overhead", "--minimum-run", "--checkpoint-every", "--until")


@pytest.mark.parametrize("option", DURATIONS)
@pytest.mark.parametrize("text", ["soon", "-5", "nan", "inf", "5 minutes", "1h30", "1e999", ""])
def test_a_bad_duration_is_refused(option: str, text: str) -> None:
    said = poise("simulate", "good.jsonl", option, text)
    assert f"Invalid value for '{option}': not a duration: {text!r}" in said.refusal


@pytest.mark.parametrize("option", DURATIONS)
@pytest.mark.parametrize("text", ["90", "90s", "1.5m", "1h30m", "7d"])
def test_a_good_duration_is_taken(option: str, text: str) -> None:
    assert poise("simulate", "good.jsonl", option, text).code == 0


CLUSTERS: dict[str, tuple[str, str]] = {
    "nothing": ("", "is not TYPE:GPUS or TYPE:GPUS@PER_NODE, e.g. v100:12@8"),
    "no count": ("gpu", "is not TYPE:GPUS"),
    "no type": (":4", "is not TYPE:GPUS"),
    "no GPUs": ("gpu:0", "needs at least 1 GPU and at least 1 a node"),
    "nodes of nothing": ("gpu:4@0", "needs at least 1 GPU and at least 1 a node"),
    "negative": ("gpu:-4", "is not TYPE:GPUS"),
    "half a GPU": ("gpu:1.5", "is not TYPE:GPUS"),
    "an open comma": ("gpu:4,", "'' is not TYPE:GPUS"),
    "a type twice": ("gpu:4,GPU:4", "type 'gpu' stands there twice; add the two up"),
    "more digits than int() reads": ("gpu:" + "9" * 5000, "makes it more than 1,000,000 GPUs; ask for fewer"),
    "more zeros than int() reads": ("gpu:" + "0" * 5000, "needs at least 1 GPU"),
    "too many": ("gpu:1000001", "makes it more than 1,000,000 GPUs"),
    "far too many": ("gpu:99999999999", "'gpu:99999999999' makes it more than 1,000,000 GPUs; ask for fewer"),
    "far too many a node": ("gpu:4@99999999999", "'gpu:4@99999999999' makes it more than 1,000,000 GPUs"),
    "too many together": ("v100:600000,k80:600000", "'k80:600000' makes it more than 1,000,000 GPUs"),
    "digits of another script": ("gpu:٤", "is not TYPE:GPUS"),
    "a type that nothing is known of": ("mi300:4", "(another type needs a cluster file that states its speed)"),
    "an unknown type": ("v10:4", "unknown GPU type 'v10'; did you mean v100 or a10"),
    "a type like none": ("quux:4", "unknown GPU type 'quux'; known: a10, a100"),
    "a file of another kind": ("good.jsonl", "good.jsonl: a file that describes a cluster ends in .yaml, .yml or .toml"),
    "a file that is not there": ("none.yaml", "none.yaml: No such file or directory"),
}


@pytest.mark.parametrize("what", CLUSTERS)
def test_a_bad_cluster_is_refused(what: str) -> None:
    spec, want = CLUSTERS[what]
    assert want in poise("simulate", "good.jsonl", "--cluster", spec).refusal


NOWHERE = {
    "--out in a file": (("--out", "good.jsonl/run"), "--out good.jsonl/run: cannot be made: Not a directory"),
    "--out that is a file": (("--out", "good.jsonl"), "Directory 'good.jsonl' is a file."),
    "--per-job in no folder": (("--per-job", "no/rows.csv"), "--per-job no/rows.csv: there is no folder no"),
    "--per-job in a file": (("--per-job", "good.jsonl/rows.csv"), "there is no folder good.jsonl"),
    "--html in a circle of links": (("--html", "circle"), "--html circle: cannot be written: Too many levels of symbolic"),
    "--html of a name without end": (("--html", "9" * 5000), "99…: cannot be written: File name too long"),
    "--per-job that is a folder": (("--per-job", "rows.json"), "File 'rows.json' is a directory."),
}


@pytest.mark.parametrize("what", NOWHERE)
def test_results_that_cannot_be_written_are_refused_before_any_work(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.json").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.setattr("poise.cli.simulate.run_simulation", None)
    words, want = NOWHERE[what]
    assert want in poise("simulate", "good.jsonl", *words).refusal


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_allows_no_writing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    for words in (("--per-job", "locked/rows.csv"), ("--out", "locked")):
        assert "permission denied" in poise("simulate", "good.jsonl", *words).refusal


def test_a_per_job_file_may_lie_in_the_folder_that_out_makes(tmp_path: Path) -> None:
    assert poise("simulate", "good.jsonl", "--out", "run", "--per-job", "run/rows.json").code == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "jobs.csv",
        "journal.jsonl",
        "rows.json",
        "summary.json",
    ]


def test_a_refused_request_leaves_nothing_behind(tmp_path: Path) -> None:
    a_trace(tmp_path, a_row("a", seconds=None, steps=5, model="nobody"), name="bad.jsonl")
    assert poise("simulate", "bad.jsonl", "--out", "run").code == 2
    assert poise("simulate", "good.jsonl", "--policy", "fif", "--out", "run").code == 2
    assert not (tmp_path / "run").exists()


def apart(*words: str, **how: object) -> tuple[Said, float, float]:
    """What a process of its own says, its seconds and its greatest number of MiB."""
    began = monotonic()
    with open("out", "w+") as out, open("err", "w+") as err:
        process = subprocess.Popen([COMMAND, *words], stdout=out, stderr=err, **how)  # type: ignore[call-overload]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Said(process.returncode, out.read(), err.read()), monotonic() - began, usage.ru_maxrss / 1024


HUGE: dict[str, tuple[tuple[str, ...], str]] = {
    "trace": (("simulate", "huge"), "huge:1: expected a trace in a known format"),
    "trace of a format": (("simulate", "huge", "--format", "gavel"), "huge:1: "),
    "journal": (("replay", "huge"), "huge: not a journal: its first line is no header"),
    "cluster": (("simulate", "good.jsonl", "--cluster", "huge.yaml"), "huge.yaml: larger than 16 MiB; that is no cluster"),
    "throughputs": (
        ("simulate", "good.jsonl", "--throughputs", "huge"),
        "huge: expected a throughput table of at most",
    ),
}


@pytest.mark.parametrize("what", HUGE)
def test_two_gigabytes_of_nothing_are_refused_in_little_time_and_memory(what: str, tmp_path: Path) -> None:
    for name in ("huge", "huge.yaml"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(2 << 30)
    words, want = HUGE[what]
    said, seconds, mebibytes = apart(*words)
    assert want in said.refusal
    assert seconds < PATIENCE / 2
    assert mebibytes < max(512, getrusage(RUSAGE_SELF).ru_maxrss / 1024 + 64)  # a child begins with its parent's


def test_a_closed_standard_input_is_an_empty_one() -> None:
    said, _, _ = apart("simulate", "-", preexec_fn=lambda: os.close(0))
    assert said.refusal == "stdin: expected at least one job, got an empty file"


def test_a_terminal_without_greek_letters_gets_the_table_all_the_same() -> None:
    said, _, _ = apart("simulate", "good.jsonl", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert said.code == 0
    assert "average JCT" in said.out
    assert said.err == ""


def test_a_file_name_that_is_no_text_is_no_trouble(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/odd\xff.jsonl"
    with open(name, "wb") as stream:
        stream.write(GOOD)
    said, _, _ = apart("simulate", os.fsdecode(name), "--out", "run")
    assert (said.code, said.err) == (0, "")
