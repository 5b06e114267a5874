"""What is said of a row that is wrong: file, line, field, value, and what was expected there."""

from pathlib import Path

import pytest

from poise.lab.traces.reader import read_trace
from poise.scheduler.model.errors import TraceError

GAVEL = "ResNet-18 (batch size 128)\tpython3 main.py\tcifar10\t--num_steps\t1\t925982\t4\t1\t-1.000000\t7.5\n"
SHOCKWAVE = "LM (batch size 10)\tpython3 main.py\tlm\t--steps\t1\t134583\t2\tgns\t1\t-1.000000\t1418\t55\n"
TIRESIAS = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,8,30,606,vgg19,164,30\n"
ITP = "job_id,submission_time,duration,num_gpu\n965d744f,1932025,2429,64\n"
PHILLY_CSV = "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,2,132.0,11cb48\n"
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    "1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0\n"
)
ALIBABA = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "pod-1,6000,12288,1,460,V100M16|V100M32,LS,Failed,100,1000,300\n"
)
PHILLY = """[
  {"status": "Killed", "vc": "ee9e8c", "jobid": "a1", "user": "u", "submitted_time": "2017-10-07 01:11:39",
   "attempts": [
     {"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:13:23",
      "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
     {"start_time": "2017-10-07 01:13:30", "end_time": "2017-10-07 01:15:30",
      "detail": [{"ip": "m3", "gpus": ["gpu0"]}]}]}
]"""
PHILLY_ATTEMPTS = """[{"id": "a1", "num_gpus": 8, "runtime": 1.0, "submitted_time": "2017-10-07 01:11:39",
  "attempts": [{"start_time": "2017-10-07 01:12:00", "end_time": "2017-10-07 01:12:10"},
               {"start_time": "2017-10-07 01:13:00", "end_time": "2017-10-07 01:14:00"}]}]"""
POISE = '{"job": "a", "submitted": 5, "gpus": 4, "duration": 60}\n'


def refused(folder: Path, text: str, format: str = "auto") -> str:
    path = folder / "t"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(str(path), format=format)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(str(path))


WRONG_ITP = [
    ("no number", "2429", "soon", ":2: duration: expected a number, got 'soon'"),
    ("empty", "2429", "", ":2: duration: expected a number, got nothing"),
    ("not finite", "2429", "nan", ":2: duration: expected a finite number of at least 0, got 'nan'"),
    ("infinite", "2429", "inf", ":2: duration: expected a finite number of at least 0, got 'inf'"),
    ("overflow", "2429", "1e999", ":2: duration: expected a finite number of at least 0, got '1e999'"),
    ("negative duration", "2429", "-1", ":2: duration: expected a finite number of at least 0, got '-1'"),
    ("negative time", "1932025", "-1", ":2: submission_time: expected a finite number of at least 0, got '-1'"),
    ("underscored", "2429", "2_429", ":2: duration: expected a finite number of at least 0, got '2_429'"),
    ("other digits", "2429", "٢", ":2: duration: expected a finite number of at least 0, got '٢'"),
    ("no GPU", ",64", ",0", ":2: num_gpu: expected a whole number from 1 to 1,000,000, got '0'"),
    ("half a GPU", ",64", ",1.5", ":2: num_gpu: expected a whole number from 1 to 1,000,000, got '1.5'"),
    ("too many GPUs", ",64", ",1000001", ":2: num_gpu: expected a whole number from 1 to 1,000,000, got '1000001'"),
    ("endless GPUs", ",64", ",inf", ":2: num_gpu: expected a whole number from 1 to 1,000,000, got 'inf'"),
    ("no id", "965d744f", "", ":2: job_id: expected a name of printable characters, got nothing"),
    ("unprintable id", "965d744f", "a\x1b[2J", ":2: job_id: expected a name of printable characters, got 'a\\x1b[2J'"),
    ("cell missing", ",64", "", ":2: expected 4 cells, as in the header, got 3"),
    ("open quote", "965d744f", '"a', ":2: expected CSV, got '\"a,1932025,2429,64' (unexpected end of data)"),
]


@pytest.mark.parametrize(("old", "new", "want"), [row[1:] for row in WRONG_ITP], ids=[row[0] for row in WRONG_ITP])
def test_wrong_cell_is_refused_with_line_field_value_and_what_was_expected(
    old: str, new: str, want: str, tmp_path: Path
) -> None:
    assert refused(tmp_path, ITP.replace(old, new)) == want


def test_same_id_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    again = ITP + "b,1,1,1\n" + ITP.splitlines()[1] + "\n"
    assert refused(tmp_path, again) == ":4: expected a new job id, got '965d744f', as on line 2"


WRONG_POISE = [
    ("misspelt key", '"gpus"', '"gpu"', ":1: expected a column of a Poise trace, got 'gpu'; did you mean gpus?"),
    ("missing key", '"gpus": 4, ', "", ":1: gpus: expected a value, got nothing"),
    ("no work", ', "duration": 60', "", ":1: duration: expected seconds, or steps, got nothing"),
    ("text for a number", "60", '"60"', ":1: duration: expected a number, got '60'"),
    ("truth for a number", "60", "true", ":1: duration: expected a number, got True"),
    ("not finite", "60", "NaN", ":1: duration: expected a finite number, got nan"),
    ("overflow", "60", "1" + "0" * 400, ":1: duration: expected a finite number, got 1" + "0" * 58 + "…"),
    ("negative", "60", "-60", ":1: duration: expected a number of at least 0, got -60"),
    ("part of a GPU", "4", "0.5", ":1: gpus: expected a whole number from 1 to 1,000,000, got 0.5"),
    ("id is a list", '"a"', "[]", ":1: job: expected a name, got a list"),
    ("not an object", POISE.strip(), POISE.strip() + "\n[]", ":2: expected a JSON object, got '[]'"),
    (
        "not JSON",
        "60}",
        "60",
        ':1: expected a JSON object, got \'{"job": "a", "submitted": 5, "gpus": 4, "duration": 60\' '
        "(Expecting ',' delimiter at column 55)",
    ),
    ("weight of nothing", "60}", '60, "weight": 0}', ":1: weight: expected a number above 0, got 0"),
    ("types no list", "60}", '60, "gpu_types": "k80"}', ":1: gpu_types: expected a list of GPU types, got 'k80'"),
    (
        "gang out of bounds",
        "60}",
        '60, "max_gpus": 2}',
        ":1: max_gpus: expected min_gpus <= gpus <= max_gpus, where gpus is 4, got 2",
    ),
    (
        "no micro-batch",
        "60}",
        '60, "micro_batches": 0}',
        ":1: micro_batches: expected a whole number from 1 to 1,000,000, got 0",
    ),
    (
        "fewer than none",
        "60}",
        '60, "micro_batches": -8}',
        ":1: micro_batches: expected a whole number from 1 to 1,000,000, got -8",
    ),
    (
        "part of one",
        "60}",
        '60, "micro_batches": 1.5}',
        ":1: micro_batches: expected a whole number from 1 to 1,000,000, got 1.5",
    ),
    (
        "too many",
        "60}",
        '60, "micro_batches": 1000001}',
        ":1: micro_batches: expected a whole number from 1 to 1,000,000, got 1000001",
    ),
    ("micro-batches in words", "60}", '60, "micro_batches": "8"}', ":1: micro_batches: expected a number, got '8'"),
    (
        "micro-batches in place of a gang",
        '"gpus": 4, "duration": 60}',
        '"micro_batches": 0, "duration": 60}',
        ":1: micro_batches: expected a whole number from 1 to 1,000,000, got 0",
    ),
    (
        "bounds of what needs none",
        "60}",
        '60, "micro_batches": 8, "min_gpus": 1}',
        ":1: min_gpus: expected nothing beside micro_batches, with which any number of GPUs will do, got 1",
    ),
    (
        "upper bound of what needs none",
        "60}",
        '60, "micro_batches": 8, "max_gpus": 8}',
        ":1: max_gpus: expected nothing beside micro_batches, with which any number of GPUs will do, got 8",
    ),
    ("sync of nothing", "60}", '60, "sync": 0.5}', ":1: sync: expected nothing where no micro_batches are given, got 0.5"),
    (
        "sync before it starts",
        "60}",
        '60, "micro_batches": 8, "sync": -1}',
        ":1: sync: expected a number of at least 0, got -1",
    ),
    ("endless sync", "60}", '60, "micro_batches": 8, "sync": 1e999}', ":1: sync: expected a finite number, got inf"),
    ("no type at all", "60}", '60, "gpu_types": []}', ":1: gpu_types: names no GPU type; leave it out for any"),
    ("outcome", "60}", '60, "outcome": "won"}', ":1: outcome: expected one of passed, failed, killed, got 'won'"),
    ("failures", "60}", '60, "failures": [[1]]}', ":1: failures: expected [seconds, cause], got a list"),
    ("nested", "60", "[" * 5000, ":1: expected a JSON object, got JSON that is nested too deeply"),
    ("types of numbers", "60}", '60, "gpu_types": [1]}', ":1: gpu_types: expected a name, got 1"),
    ("failures no list", "60}", '60, "failures": 1}', ":1: failures: expected a list of [seconds, cause], got 1"),
    ("loss", "60}", '60, "loss": [1, 1]}', ":1: loss: expected [a, b, c] with a >= 0, b > 0, c >= 0, got a list"),
    ("loss no list", "60}", '60, "loss": 0.5}', ":1: loss: expected [a, b, c] with a >= 0, b > 0, c >= 0, got 0.5"),
    (
        "loss of infinity",
        "60}",
        '60, "loss": [1, 0, 1]}',
        ":1: loss: expected [a, b, c] with a >= 0, b > 0, c >= 0, got a list",
    ),
    ("loss that rises", "60}", '60, "loss": [-1, 1, 1]}', ":1: loss: expected a number of at least 0, got -1"),
    ("loss in words", "60}", '60, "loss": ["a", 1, 1]}', ":1: loss: expected a number, got 'a'"),
    ("lone surrogate", '"a"', '"\\ud800"', ":1: job: expected a name of printable characters, got '\\ud800'"),
]


@pytest.mark.parametrize(("old", "new", "want"), [row[1:] for row in WRONG_POISE], ids=[row[0] for row in WRONG_POISE])
def test_wrong_value_in_a_poise_row_is_refused(old: str, new: str, want: str, tmp_path: Path) -> None:
    assert refused(tmp_path, POISE.replace(old, new)) == want


def test_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, POISE.replace("60", "6" * 10_000)).endswith("with a number of too many digits")


def test_poise_csv_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    text = "job,submitted,gpus,gpus,duration\na,0,1,2,5\n"
    assert refused(tmp_path, text) == ":1: gpus: expected every column once, got it twice"


def test_poise_csv_with_an_unknown_column_names_the_nearest(tmp_path: Path) -> None:
    text = "job,submitted,gpus,duraton\na,0,1,5\n"
    assert refused(tmp_path, text) == ":1: expected a column of a Poise trace, got 'duraton'; did you mean duration?"


WRONG_OTHER = [
    ("gavel", GAVEL, "\t1\t925982", "\t2\t925982", ":1: needs_data: expected 0 or 1, got '2'"),
    ("gavel", GAVEL, "\t7.5", "", ":1: expected 10 tab-separated cells, or the older 7, got 9"),
    ("gavel", GAVEL, "\t1\t-1.0", "\t0\t-1.0", ":1: weight: expected a number above 0, got '0'"),
    ("gavel", GAVEL, "\t1\t-1.0", "\tinf\t-1.0", ":1: weight: expected a finite number, got 'inf'"),
    ("gavel", GAVEL, "-1.000000", "0", ":1: SLO: expected -1 for none, or a multiple of the duration, got '0'"),
    ("gavel", GAVEL, "size 128", "size 0", ":1: job_type: expected a whole number from 1 to 1,000,000,000, got '0'"),
    ("shockwave", SHOCKWAVE, "gns", "magic", ":1: mode: expected one of static, accordion, gns, got 'magic'"),
    ("shockwave", SHOCKWAVE, "\t55", "", ":1: expected 12 tab-separated cells, got 11"),
    ("philly-csv", PHILLY_CSV, "2017-10-09", "soon", ":2: timestamp: expected a time such as 2017-10-09 07:01:55, got"),
    ("philly-csv", PHILLY_CSV, "2017", "1917", ":2: timestamp: expected a time after 1970, got '1917-10-09 07:01:55'"),
    ("alibaba", ALIBABA, "1000,300", "1000,3000", ":2: deletion_time: expected a time of at least 3000, at"),
    ("alibaba", ALIBABA, "Failed", "Lost", ":2: pod_phase: expected one of Succeeded, Running,"),
    ("philly", PHILLY, "Killed", "Lost", ":2: status: expected one of Pass, Killed, Failed, got 'Lost'"),
    ("philly", PHILLY, '"2017-10-07 01:11:39"', "17", ":2: submitted_time: expected text, got 17"),
    ("philly", PHILLY, '["gpu0"]', '"gpu0"', ":2: gpus: expected a list, got 'gpu0'"),
    ("philly", PHILLY, '{"ip": "m2", "gpus": ["gpu0"]}', "3", ":2: detail: expected a list of objects, got 3"),
    ("philly", PHILLY_ATTEMPTS, "8,", "true,", ":1: num_gpus: expected a whole number from 0 to 1,000,000, got True"),
    ("itp", TIRESIAS, "", "", ":1: expected a header with the columns job_id, submission_time, duration, num_gpu"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "old", "new", "want"), WRONG_OTHER)
def test_wrong_row_of_a_public_format_is_refused(
    format: str, text: str, old: str, new: str, want: str, tmp_path: Path
) -> None:
    assert refused(tmp_path, text.replace(old, new), format).startswith(want)


def test_helios_unknown_state_lists_the_known_ones(tmp_path: Path) -> None:
    assert refused(tmp_path, HELIOS.replace("FAILED", "LOST")).startswith(":2: state: expected one of COMPLETED, PASS,")
