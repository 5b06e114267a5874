"""`poise replay`: what was decided is decided again, and what does not fit is said in one line."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.shell import EVENTS, FOUR, a_trace, poise

from poise.engine.journal import VERSION

RUNS = {
    "queue": ("--policy", "las", *EVENTS),
    "planner": ("--policy", "stride:quantum=600"),
    "memory": ("--policy", "tiresias-gittins:limits=600,samples=3"),
    "stable": ("--policy", "srsf", "--preset", "tiresias"),
    "rounds": ("--policy", "srtf", "--preset", "gavel"),
    "trouble": ("--policy", "tiresias:limits=900,promote=2", "--faults", "mtbf=12h,repair=1h", "--minimum-run", "300"),
    "drains": ("--policy", "gandiva", "--drain", "p100-0@10m..2h", "--drain", "v100-1:0,3@1h..", "--faults", "mtbf=12h"),
}


@pytest.mark.parametrize("run", RUNS)
def test_replay_of_a_run_is_exact(run: str, tmp_path: Path) -> None:
    trace = "synthetic:jobs=60,seed=2,failures=philly,rate=60,models=vae/resnet50/vgg16,weights=1:1/3:1"
    assert poise("simulate", trace, "--cluster", "p100:8@2,v100:8", *RUNS[run], "--out", tmp_path / "run").code == 0
    said = poise("replay", tmp_path / "run")
    assert (said.code, said.err) == (0, "")
    assert "came out the same" in said.out


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    assert poise("simulate", a_trace(tmp_path, *FOUR), "--cluster", "gpu:4", *EVENTS, "--out", tmp_path / "run").code == 0
    return tmp_path / "run" / "journal.jsonl"


def test_json_says_how_much_came_out_the_same(journal: Path) -> None:
    want = {"journal": str(journal), "policy": "fifo", "instants": 8, "events": 12, "actions": 4, "exact": True}
    assert poise("replay", journal, "--json").json == want
    assert poise("replay", journal.parent, "--json").json == want | {"journal": str(journal.parent)}


def test_a_packed_journal_is_as_good(journal: Path) -> None:
    packed = journal.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(journal.read_bytes()))
    assert poise("replay", packed, "--json").json["exact"] is True


def changed(journal: Path, old: str, new: str) -> Path:
    text = journal.read_text()
    assert text.count(old) == 1, text
    journal.write_text(text.replace(old, new))
    return journal


def test_a_tampered_action_fails_with_both_shown(journal: Path) -> None:
    said = poise("replay", changed(journal, '"launch","A",1,[[0,7]]', '"launch","A",1,[[0,11]]'))
    assert 'at 0.0: the journal has ["launch","A",1,[[0,11]]' in said.failure
    assert 'the core answers ["launch","A",1,[[0,7]]' in said.failure


MISSING_WISH = ('[["launch","B",1,[[0,15]],[0.0,0.0,90.0]]]', "[]")


def test_an_action_that_the_journal_lacks_fails(journal: Path) -> None:
    said = poise("replay", changed(journal, *MISSING_WISH))
    assert said.failure.startswith('at 100.0: the journal has nothing, the core answers ["launch","B"')


def test_an_action_that_the_core_does_not_take_fails(journal: Path) -> None:
    said = poise("replay", changed(journal, "[100.0,[[", '[100.0,[["cancelled","B"],['))
    assert said.failure.startswith('at 100.0: the journal has ["launch","B"')


IMPOSSIBLE = {
    "a job submitted twice": ('"id":"B"', '"id":"A"'),
    "fewer GPUs than none": ('"gpus":4,"duration":20.0', '"gpus":-4,"duration":20.0'),
    "a kind that nobody estimated": ('"duration":20.0},"-/x4"', '"duration":20.0},"nobody"'),
    "a node that is not there": ('["finished","A",1]', '["nodelost",77]'),
    "a slot that is not there": ('["finished","A",1]', '["noderestricted",0,[0,9],true]'),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_facts_that_cannot_be_fail_in_one_line(what: str, journal: Path) -> None:
    said = poise("replay", changed(journal, *IMPOSSIBLE[what]))
    assert "the core cannot take in what the journal says" in said.failure


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda data: b"".join(data.splitlines(keepends=True)[:count])


def line(number: int, text: bytes) -> Callable[[bytes], bytes]:
    def replaced(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        lines[number - 1] = text + b"\n"
        return b"".join(lines)

    return replaced


def swapped(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def replaced(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return replaced


NO_HEADER = "not a journal: its first line is no header"
NO_TEXT = "not a journal: its first line is no text"
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", NO_HEADER),
    "a trace": (lambda _: b'{"job": "a", "submitted": 0, "gpus": 1, "duration": 5}\n', NO_HEADER),
    "garbage": (lambda _: b"lorem ipsum\n" * 9, NO_HEADER),
    "binary": (lambda _: bytes(range(255, -1, -1)) * 9, NO_TEXT),
    "bytes that are no text": (line(3, b"\xff\xfe"), "journal.jsonl:3: damaged: not UTF-8 text"),
    "zeros": (lambda _: bytes(9999), NO_HEADER),
    "another document": (lambda _: b'{"jobs": []}\n', NO_HEADER),
    "header cut": (lambda data: data[:40], "journal.jsonl:1: not JSON"),
    "header only": (cut(1), "journal.jsonl:1: cut off here: the last line of a journal is missing"),
    "cut between lines": (cut(4), "journal.jsonl:4: cut off here: the last line of a journal is missing"),
    "cut in a line": (lambda data: cut(4)(data)[:-9], "journal.jsonl:4: not JSON"),
    "a newer version": (
        swapped(b'"journal":%d' % VERSION, b'"journal":%d' % (VERSION + 1)),
        "written in journal version 3; this Poise reads version 2",
    ),
    "no settings": (line(1, b'{"journal":1}'), "journal.jsonl:1: not a header of a journal: 'settings'"),
    "no nodes": (swapped(b'[["gpu-0","gpu",4,"rack-0"]]', b"[]"), ":1: not a header of a journal: the cluster has no node"),
    "a policy that is a number": (swapped(b'"policy":"fifo"', b'"policy":3'), "expected text, got 3"),
    "an unknown policy": (swapped(b'"policy":"fifo"', b'"policy":"fifi"'), "unknown policy 'fifi'; did you mean fifo"),
    "an unknown placement": (swapped(b'"count"', b'"coun"'), "unknown placement 'coun'; did you mean count"),
    "half a GPU": (swapped(b'"gpu-0","gpu",4', b'"gpu-0","gpu",0.5'), "expected a number of GPUs, got 0.5"),
    "endless GPUs": (swapped(b'"gpu-0","gpu",4', b'"gpu-0","gpu",' + b"9" * 99), "expected a number of GPUs, got 9"),
    "an unknown event": (swapped(b'"finished"', b'"finnished"'), "not an entry of a journal: 'finnished'"),
    "a value too many": (swapped(b'["finished","A",1]', b'["finished","A",1,2]'), "not an entry of a journal"),
    "an unknown field": (swapped(b'{"id":"A"', b'{"idd":"A"'), "not an entry of a journal"),
    "no list": (line(3, b"17"), "journal.jsonl:3: not an entry of a journal"),
    "another end": (line(9, b'{"end":"soon"}'), "journal.jsonl:9: not an entry of a journal"),
    "not a number": (swapped(b"[10.0,", b"[NaN,"), "journal.jsonl:3: not JSON"),
    "a moment without end": (swapped(b"[10.0,", b"[1e999,"), "expected a time not before 0.0, got inf"),
    "time going backwards": (swapped(b"[20.0,", b"[9.0,"), "expected a time not before 10.0, got 9.0"),
    "a moment in words": (swapped(b"[20.0,", b'["now",'), "journal.jsonl:4: not an entry of a journal"),
    "brackets without end": (line(3, b"[" * 100_000), "journal.jsonl:3: not JSON"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_journal_fails_with_its_place_and_what_is_no_journal_is_refused(what: str, journal: Path) -> None:
    damage, want = DAMAGED[what]
    journal.write_bytes(damage(journal.read_bytes()))
    said = poise("replay", journal)
    is_refused = want in (NO_HEADER, NO_TEXT) or want.startswith("unknown")
    assert want in (said.refusal if is_refused else said.failure)


def test_a_damaged_packed_journal_fails(journal: Path) -> None:
    packed = journal.with_suffix(".gz")
    whole = gzip.compress(journal.read_bytes())
    packed.write_bytes(whole[:-20])
    assert "cut off: the end of its compressed data is missing" in poise("replay", packed).failure
    packed.write_bytes(journal.read_bytes())
    assert "not a journal: expected gzip-compressed data, as its name says" in poise("replay", packed).refusal


def test_a_packed_journal_with_another_checksum_is_damaged(journal: Path) -> None:
    packed = journal.with_suffix(".gz")
    whole = gzip.compress(journal.read_bytes())
    packed.write_bytes(whole[:-8] + bytes(4) + whole[-4:])
    assert "damaged: its compressed data cannot be unpacked" in poise("replay", packed).failure


@pytest.mark.parametrize("verb", ["replay", "shares", "analyze"])
def test_a_binary_file_is_refused_without_a_word_of_codecs(verb: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_bytes(bytes(range(255, -1, -1)) * 9)
    said = poise(verb, tmp_path / "run").refusal
    assert "not a journal" in said
    assert "codec" not in said


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    assert poise("replay", tmp_path / "none").refusal.endswith("none: cannot be read: No such file or directory")
    assert poise("replay", tmp_path).refusal.endswith("journal.jsonl: cannot be read: No such file or directory")
