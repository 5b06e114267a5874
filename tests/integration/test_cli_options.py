"""What each option of `poise simulate` changes, in numbers worked out by hand."""

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from tests.shell import EVENTS, FOUR, a_row, a_trace, jcts, per_job, poise, simulated

from poise.lab.traces.synthetic import KNOBS


def test_preset_gavel_decides_at_rounds_and_leaves_freed_gpus_idle(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("a", seconds=100), a_row("b", seconds=100))
    assert jcts(trace, tmp_path, "--cluster", "gpu:1") == {"a": 100, "b": 200}
    assert jcts(trace, tmp_path, "--cluster", "gpu:1", "--preset", "gavel") == {"a": 100, "b": 460}


EXPLICIT = {
    "round": (("--round", "5m"), 400),
    "backfill": (("--backfill",), 200),
    "cadence": (("--cadence", "events"), 200),
}


@pytest.mark.parametrize("option", EXPLICIT)
def test_explicit_options_win_over_the_preset(option: str, tmp_path: Path) -> None:
    words, want = EXPLICIT[option]
    trace = a_trace(tmp_path, a_row("a", seconds=100), a_row("b", seconds=100))
    assert jcts(trace, tmp_path, "--cluster", "gpu:1", "--preset", "gavel", *words)["b"] == want


def test_preset_count_is_overruled_by_a_placement(tmp_path: Path) -> None:
    """Two nodes slow VGG16 down from 103.6 to 80.4 steps a second; where GPUs are only counted they do not."""
    row = a_row("a", at=1, gpus=4, seconds=None, steps=1036, model="VGG16", batch_size=1)
    trace = a_trace(tmp_path, a_row("large node", gpus=3, seconds=1000), row)
    (tmp_path / "c.yaml").write_text("nodes: [{type: p100, gpus: 4}, {type: p100, gpus: 2, count: 2}]")
    options = ("--cluster", tmp_path / "c.yaml", "--preset", "tiresias")
    assert jcts(trace, tmp_path, *options)["a"] == pytest.approx(10)
    assert jcts(trace, tmp_path, *options, "--placement", "consolidate")["a"] == pytest.approx(1036 / 80.4)


def test_recompute_puts_off_new_shares_and_wins_over_the_preset(tmp_path: Path) -> None:
    """The first shares may be replaced at 10. Those in which `late` has a part come at 20, or 100 s after the ones at 10."""
    trace = a_trace(tmp_path, a_row("a", seconds=3000), a_row("b", at=5, seconds=3000), a_row("late", at=15, seconds=10))
    options = ("--cluster", "gpu:3", "--policy", "max-min", "--round", "10")
    rounds = (*options, "--cadence", "rounds", "--no-backfill")
    assert jcts(trace, tmp_path, *rounds)["late"] == 15
    assert jcts(trace, tmp_path, *rounds, "--recompute", "100s")["late"] == 105
    assert jcts(trace, tmp_path, *options, "--preset", "gavel")["late"] == 1925
    assert jcts(trace, tmp_path, *options, "--preset", "gavel", "--recompute", "100s")["late"] == 105


def test_load_divides_the_time_between_arrivals(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *(a_row(str(n), at=100 + 30 * n) for n in range(4)))
    rows = per_job(trace, tmp_path, "--load", "2")
    moments = [row["submitted"] for row in rows.values()]
    assert moments[0] == 100
    assert [later - earlier for earlier, later in pairwise(moments)] == [15, 15, 15]
    assert [row["submitted"] for row in per_job(trace, tmp_path, "--load", "0.5").values()] == [100, 160, 220, 280]


def test_jobs_keeps_the_first_ones(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("late", at=9), a_row("first", at=1), a_row("second", at=2))
    assert list(per_job(trace, tmp_path, "--jobs", "2")) == ["first", "second"]
    assert simulated(trace, "--jobs", "99")["jobs"] == 3


def test_until_counts_from_the_first_submission(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("a", at=1000, seconds=50), a_row("b", at=1000, seconds=70))
    got = simulated(trace, "--until", "1m")
    assert (got["finished"], got["unfinished"], got["partial"]) == (1, 1, False)


def test_restart_overhead_adds_to_every_start(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *FOUR)
    options = ("--cluster", "gpu:4", *EVENTS, "--restart-overhead", "5")
    assert jcts(trace, tmp_path, "--policy", "fifo", *options) == {"A": 105, "B": 120, "C": 145, "D": 165}
    one = a_trace(tmp_path, a_row("one", seconds=60), name="one.jsonl")
    assert jcts(one, tmp_path, "--restart-overhead", "30s") == {"one": 90}
    assert jcts(one, tmp_path, "--restart-overhead", "0") == {"one": 60}


def test_minimum_run_puts_off_a_preemption(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("long", seconds=100), a_row("short", at=10, seconds=20))
    options = ("--cluster", "gpu:1", "--policy", "srtf", *EVENTS)
    assert jcts(trace, tmp_path, *options) == {"long": 120, "short": 20}
    assert jcts(trace, tmp_path, *options, "--minimum-run", "40") == {"long": 120, "short": 50}


def test_retries_bound_the_failed_runs_that_are_forgiven(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("dies", seconds=100, failures=[[10, "x"], [10, "x"]]))
    assert simulated(trace, "--retries", "2", "--checkpoint-every", "1")["finished"] == 1
    got = simulated(trace, "--retries", "1")
    assert (got["failed"], got["avg_jct"]) == (1, 20)


def test_checkpoints_bound_the_work_that_a_failure_takes(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("dies", seconds=100, failures=[[70, "x"]]))
    assert jcts(trace, tmp_path, "--checkpoint-every", "600") == {"dies": 170}
    assert jcts(trace, tmp_path, "--checkpoint-every", "30") == {"dies": 110}
    assert jcts(trace, tmp_path, "--checkpoint-every", "0") == {"dies": 100}


def test_retry_by_cause_gives_up_what_no_retry_heals_and_backs_off_from_what_passes(tmp_path: Path) -> None:
    hopeless = a_trace(tmp_path, a_row("a", seconds=100, failures=[[10, "syntax-error"]]), name="hopeless.jsonl")
    assert simulated(hopeless, "--retry", "count")["finished"] == 1
    assert simulated(hopeless, "--retry", "cause")["failed"] == 1
    passing = a_trace(tmp_path, a_row("a", seconds=100, failures=[[10, "network-error"]]), name="passing.jsonl")
    assert jcts(passing, tmp_path, "--retry", "cause") == {"a": 10 + 60 + 100}
    assert jcts(passing, tmp_path, "--retry", "cause", "--backoff", "5m") == {"a": 10 + 300 + 100}
    assert jcts(passing, tmp_path, "--retry", "count", "--backoff", "5m") == {"a": 10 + 100}


SCATTERED = (a_row("x", gpus=3, seconds=100), a_row("y", gpus=3, seconds=100), a_row("pair", at=1, gpus=2))


def test_waits_for_locality_hold_a_job_back_for_so_long(tmp_path: Path) -> None:
    """One GPU is free on each of two nodes, which share a rack."""
    trace = a_trace(tmp_path, *SCATTERED)
    options = ("--cluster", "gpu:8", "--cadence", "events")
    assert jcts(trace, tmp_path, *options)["pair"] == 10
    assert jcts(trace, tmp_path, *options, "--packed-wait", "30")["pair"] == 40
    assert jcts(trace, tmp_path, *options, "--rack-wait", "30")["pair"] == 10
    rows = per_job(trace, tmp_path, *options, "--packed-wait", "30")
    assert rows["pair"]["wait_fragmentation"] == 30


def test_defragment_moves_small_jobs_for_a_gang_that_insists(tmp_path: Path) -> None:
    rows = (a_row("fill", gpus=3, seconds=1), a_row("a", seconds=100), a_row("b", seconds=100), a_row("gang", at=50, gpus=4))
    options = ("--cluster", "gpu:8", "--cadence", "events", "--packed-wait", "1d")
    trace = a_trace(tmp_path, *rows)
    assert jcts(trace, tmp_path, *options)["gang"] == 60
    assert jcts(trace, tmp_path, *options, "--defragment", "10")["gang"] == 10
    assert simulated(trace, *options, "--defragment", "10")["preemptions"] == 1


def test_validation_pool_lets_broken_gangs_fail_on_one_gpu(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("broken", gpus=4, seconds=1000, failures=[[20, "syntax-error"]]), a_row("good", gpus=4))
    options = ("--cluster", "gpu:16", "--cadence", "events", "--retry", "cause")
    assert per_job(trace, tmp_path, *options)["broken"]["gpu_seconds"] == 80
    pool = (*options, "--validation-pool", "2", "--validation-time", "30")
    rows = per_job(trace, tmp_path, *pool)
    assert rows["broken"]["gpu_seconds"] == 20
    assert (rows["good"]["jct"], rows["good"]["gpu_seconds"]) == (40, 30 + 40)


def test_elastic_lets_jobs_without_bounds_run_on_fewer_gpus(tmp_path: Path) -> None:
    """In what is believed of its speed; rows that state bounds keep them."""
    trace = a_trace(tmp_path, a_row("a", gpus=4), a_row("b", gpus=4, min_gpus=2))
    for words, kinds in (((), ["-/x4", "-/x4[2-4]"]), (("--elastic",), ["-/x4[1-4]", "-/x4[2-4]"])):
        poise("simulate", trace, "--out", tmp_path / f"run{len(words)}", *words)
        lines = (tmp_path / f"run{len(words)}" / "journal.jsonl").read_text().splitlines()
        events = [event for line in lines[1:-1] for event in json.loads(line)[1]]
        assert [event[1] for event in events if event[0] == "estimated"] == kinds


SLOW = """# reference: v100
model,batch_size,gpu_type,gpus,locality,steps_per_second
m,,v100,1,packed,{rate}
n,,v100,1,packed,10
"""


def test_true_throughputs_are_the_world_and_throughputs_the_belief(tmp_path: Path) -> None:
    """The world is ten times slower for m than believed: the order is by belief, the times are true."""
    (tmp_path / "believed.csv").write_text(SLOW.format(rate=10))
    (tmp_path / "true.csv").write_text(SLOW.format(rate=1))
    rows = (a_row("m", seconds=None, steps=100, model="m"), a_row("n", seconds=None, steps=200, model="n"))
    trace = a_trace(tmp_path, *rows)
    options = ("--cluster", "v100:1", "--policy", "srtf", *EVENTS, "--throughputs", tmp_path / "believed.csv")
    assert jcts(trace, tmp_path, *options) == {"m": 10, "n": 30}
    assert jcts(trace, tmp_path, *options, "--true-throughputs", tmp_path / "true.csv") == {"m": 100, "n": 120}
    options = (*options[:-1], tmp_path / "true.csv")
    assert jcts(trace, tmp_path, *options) == {"m": 120, "n": 20}


ODD = """# reference: v100
model,batch_size,gpu_type,gpus,locality,steps_per_second
odd,,v100,1,packed,100
odd,,k80,1,packed,1
"""
ODD += "".join(f"{model},,{on},1,packed,10\n" for model in ("n", "o", "p") for on in ("v100", "k80"))


def odd_jcts(folder: Path, *options: object) -> dict[str, float]:
    """Under srtf on a K80, of `m`, 100 steps of the odd model, and `n`, 200 steps of another."""
    (folder / "odd.csv").write_text(ODD)
    rows = (a_row("m", seconds=None, steps=100, model="odd"), a_row("n", seconds=None, steps=200, model="n"))
    given = ("--cluster", "k80:1", "--policy", "srtf", *EVENTS, "--throughputs", folder / "odd.csv")
    return jcts(a_trace(folder, *rows), folder, *given, *options)


ON_A_V100 = ("--estimate", "profiled:types=1,rank=0,seed=1")
"""By this seed the profile of `odd` is on a V100, so that it is believed to be as fast on a K80, where it is not."""


def test_estimate_changes_what_is_believed_and_not_the_world(tmp_path: Path) -> None:
    """Believed to be the shorter one, `m` goes first; it takes its 100 s all the same."""
    assert odd_jcts(tmp_path) == {"m": 120, "n": 20}
    assert odd_jcts(tmp_path, *ON_A_V100) == {"m": 100, "n": 120}
    assert odd_jcts(tmp_path, "--estimate", "profiled:types=all") == {"m": 120, "n": 20}


def test_estimate_leaves_the_world_to_true_throughputs(tmp_path: Path) -> None:
    (tmp_path / "true.csv").write_text(ODD.replace("odd,,k80,1,packed,1\n", "odd,,k80,1,packed,2\n"))
    assert odd_jcts(tmp_path, *ON_A_V100, "--true-throughputs", tmp_path / "true.csv") == {"m": 50, "n": 70}


def test_estimate_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    one, again, other = (odd_jcts(tmp_path, "--estimate", f"profiled:types=1,rank=0,seed={seed}") for seed in (1, 1, 2))
    assert one == again != other


def test_estimate_says_how_far_off_it_is_unless_asked_to_be_quiet() -> None:
    options = ("synthetic:jobs=2", "--estimate", "profiled")
    for verb in (("simulate", *options), ("compare", *options, "--policies", "fifo")):
        said = poise(*verb)
        assert said.code == 0
        assert re.search(r"^note: 19 job classes estimated: \d+ speeds alone, off by ", said.err, re.MULTILINE)
        assert poise(*verb, "--quiet").err == ""


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("", "estimate '': expected profiled:KEY=VALUE"),
        ("profile", "estimate 'profile': expected profiled:KEY=VALUE"),
        ("profiled:tpyes=1", "expected profiled:KEY=VALUE,... with each key once, of types, pairs,"),
        ("profiled:pairs=2", "pairs: expected a number from 0 to 1, got '2'"),
        ("profiled:references=19", "expected fewer references than the 19 job classes of table 'shipped', got 19"),
    ],
)
@pytest.mark.parametrize("verb", [("simulate",), ("compare", "--policies", "fifo")])
def test_a_bad_estimate_is_refused(verb: tuple[str, ...], spec: str, want: str) -> None:
    assert want in poise(*verb, "synthetic:jobs=2", "--estimate", spec).refusal


def test_seed_and_faults_decide_which_nodes_are_lost(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *(a_row(str(n), gpus=4, seconds=40_000) for n in range(8)))
    options = ("--cluster", "gpu:16", "--faults", "mtbf=6h,repair=1h")
    one, again, other = (per_job(trace, tmp_path, *options, "--seed", seed) for seed in (1, 1, 2))
    assert one == again != other
    got = simulated(trace, *options, "--seed", 1)
    assert got["restarts"] > 0
    assert got["seed"] == 1
    assert got["finished"] == 8


def test_a_drained_node_stops_its_jobs_without_loss_and_is_not_counted_as_there(tmp_path: Path) -> None:
    """The node is drained from 40 to 100 s after the first submission, which is at 7 s."""
    trace = a_trace(tmp_path, a_row("a", at=7, seconds=100))
    options = ("--cluster", "gpu:1", "--drain", "gpu-0@40..100")
    assert jcts(trace, tmp_path, *options) == {"a": 160}
    got = simulated(trace, *options)
    assert (got["restarts"], got["preemptions"], got["utilisation"]) == (0, 1, 1)


def test_a_lost_node_stops_its_jobs_and_is_not_counted_as_there(tmp_path: Path) -> None:
    """The node is away from 40 to 100; the job goes on from its checkpoint at 30, on the GPU-seconds that were there."""
    trace = a_trace(tmp_path, a_row("a", seconds=100))
    faults = tmp_path / "faults.jsonl"
    faults.write_text('{"node": "gpu-0", "time": 40, "duration": 60}\n\n')
    options = ("--cluster", "gpu:1", "--faults", faults, "--checkpoint-every", "30")
    assert jcts(trace, tmp_path, *options) == {"a": 170}
    got = simulated(trace, *options)
    assert (got["restarts"], got["utilisation"], got["gpu_hours"] * 3600) == (1, 1, pytest.approx(110))


def test_fairness_is_among_jobs_or_among_tenants(tmp_path: Path) -> None:
    """Two jobs of A and one of B, 100 s each on one GPU: B has its third of the jobs, but not its half of the tenants."""
    rows = (a_row("a1", seconds=100, tenant="A"), a_row("a2", seconds=100, tenant="A"), a_row("b", seconds=100, tenant="B"))
    options = (a_trace(tmp_path, *rows), "--cluster", "gpu:1")
    assert simulated(*options)["worst_rho"] == pytest.approx(300 / 200)
    got = simulated(*options, "--fairness", "tenant")
    assert got["worst_rho"] == pytest.approx(300 / (100 * 5 / 3))
    assert got["mean_rho"] == pytest.approx((0.5 + 1 + 1.8) / 3)
    assert got["unfair_fraction"] == pytest.approx(1 / 3)


def test_format_is_taken_at_its_word(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("job_id,submission_time,duration,num_gpu\na,5,20,2\n")
    assert simulated(trace)["avg_jct"] == simulated(trace, "--format", "itp")["avg_jct"] == 20
    assert "expected" in poise("simulate", trace, "--format", "poise").refusal


def test_trace_comes_from_stdin_packed_or_not(tmp_path: Path) -> None:
    text = a_trace(tmp_path, *FOUR).read_bytes()
    for given in (text, gzip.compress(text)):
        got = poise("simulate", "-", "--json", stdin=given).json
        assert (got["jobs"], got["trace"]) == (4, "stdin")


def test_a_folder_of_traces_is_merged_by_time(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    a_trace(folder, a_row("x", at=5), name="one.jsonl")
    (folder / "two.jsonl.gz").write_bytes(gzip.compress(a_trace(tmp_path, a_row("x", at=1)).read_bytes()))
    said = poise("simulate", folder, "--per-job", tmp_path / "rows.csv")
    assert "note: 2 files merged" in said.err
    assert [line.split(",")[0] for line in (tmp_path / "rows.csv").read_text().splitlines()[1:]] == ["two/x", "one/x"]


def test_synthetic_is_a_trace_by_itself() -> None:
    got = simulated("synthetic:jobs=50,seed=4")
    assert (got["jobs"], got["trace"]) == (50, "synthetic:jobs=50,seed=4")
    assert simulated("synthetic:jobs=50,seed=5")["avg_jct"] != got["avg_jct"]


def test_synthetic_help_lists_every_knob() -> None:
    said = poise("simulate", "synthetic:help")
    assert (said.code, said.err) == (0, "")
    assert all(f"{knob.name}={knob.default}" in said.out for knob in KNOBS)
    for verb in ("simulate", "analyze"):
        assert [each["name"] for each in poise(verb, "synthetic:help", "--json").json] == [knob.name for knob in KNOBS]


CLUSTER_YAML = """
nodes:
  - {type: V100, gpus: 2, count: 2, rack: a}
  - {type: mine, gpus: 3, name: big, rack: b}
types:
  mine: {speed: 4, price: 2.5}
"""
CLUSTER_TOML = """
[[nodes]]
type = "V100"
gpus = 2
count = 2
rack = "a"
[[nodes]]
type = "mine"
gpus = 3
name = "big"
rack = "b"
[types.mine]
speed = 4
price = 2.5
"""


@pytest.mark.parametrize(("name", "text"), [("c.yaml", CLUSTER_YAML), ("c.yml", CLUSTER_YAML), ("c.TOML", CLUSTER_TOML)])
def test_cluster_comes_from_a_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    trace = a_trace(tmp_path, a_row("fast", seconds=40, gpus=3), a_row("slow", seconds=40, gpus=4))
    said = poise("simulate", trace, "--cluster", tmp_path / name, "--json", "--per-job", tmp_path / "rows.json")
    assert said.json["cluster"] == "v100:4@2,mine:3@3"
    assert [row["jct"] for row in json.loads((tmp_path / "rows.json").read_text())] == [10, 40]
