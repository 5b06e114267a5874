"""`poise bench solve`."""

import pytest
from tests.shell import poise

KEYS = ["policy", "jobs", "seconds", "objective", "types", "seed", "classes", "gpus", "repeats", "bound"]


def _solved(*options: object) -> dict[str, object]:
    document = poise("bench", "solve", *options, "--json").json
    assert isinstance(document, dict)
    return document


def test_json_has_these_keys_and_what_was_asked_for() -> None:
    document = _solved("--policy", "max-min", "--jobs", 30, "--types", 2, "--seed", 4, "--gpus", 9, "--repeat", 2)
    assert list(document) == KEYS
    seconds, objective = document.pop("seconds"), document.pop("objective")
    assert isinstance(seconds, float)
    assert isinstance(objective, float)
    assert seconds > 0 < objective
    asked = {"policy": "max-min", "jobs": 30, "types": 2, "seed": 4, "classes": None, "gpus": 9, "repeats": 2, "bound": None}
    assert document == asked


def test_defaults_are_three_types_seed_0_and_best_of_three() -> None:
    document = _solved("--policy", "makespan", "--jobs", 10)
    assert [document[key] for key in ("types", "seed", "classes", "repeats")] == [3, 0, None, 3]


def test_the_same_options_have_the_same_objective_and_another_seed_another() -> None:
    options = ("--policy", "finish-time", "--jobs", 40, "--repeat", 1)
    first, again, other = _solved(*options), _solved(*options), _solved(*options, "--seed", 1)
    assert first["objective"] == again["objective"] != other["objective"]


def test_packed_is_measured_on_26_classes_unless_told_otherwise() -> None:
    options = ("--policy", "max-min+packed", "--jobs", 20, "--repeat", 1)
    assert _solved(*options)["classes"] == 26
    assert _solved(*options, "--classes", 3)["classes"] == 3


def test_an_auction_has_half_a_gpu_for_each_app_that_bids_and_one_type() -> None:
    document = _solved("--policy", "themis", "--jobs", 60, "--repeat", 1)
    assert list(document) == KEYS
    assert [document[key] for key in ("policy", "jobs", "types", "gpus")] == ["themis", 60, 1, 30]
    assert isinstance(document["objective"], float)
    assert poise("bench", "solve", "--policy", "themis", "--jobs", 1, "--repeat", 1).code == 0


def test_a_plan_of_hare_is_not_below_its_bound() -> None:
    document = _solved("--policy", "hare", "--jobs", 20, "--repeat", 1)
    objective, bound = document["objective"], document["bound"]
    assert isinstance(objective, float)
    assert isinstance(bound, float)
    assert 0 < bound <= objective
    assert "none below" in poise("bench", "solve", "--policy", "hare", "--jobs", 5, "--repeat", 1).out


def test_a_policy_that_optimises_nothing_has_no_objective() -> None:
    assert _solved("--policy", "isolated", "--jobs", 5)["objective"] is None
    assert "objective" not in poise("bench", "solve", "--policy", "isolated", "--jobs", 5).out


def test_people_get_one_line() -> None:
    said = poise("bench", "solve", "--policy", "max-min", "--jobs", 1_000, "--types", 1, "--gpus", 1_200, "--repeat", 1)
    assert (said.code, said.err) == (0, "")
    assert len(said.out.splitlines()) == 1
    assert said.out.startswith("max-min: 1,000 jobs on 1,200 GPUs of 1 type: ")
    assert "CPU seconds, best of 1; objective " in said.out


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (("--policy", "mx-min", "--jobs", 5), "unknown policy 'mx-min'; did you mean max-min?"),
        (("--policy", "max-min+pcked", "--jobs", 5), "did you mean packed"),
        (("--policy", "fifo", "--jobs", 5), "times policies that answer with shares, themis and hare; not 'fifo'"),
        (("--policy", "max-min", "--jobs", 0), "--jobs"),
        (("--policy", "max-min", "--jobs", -3), "--jobs"),
        (("--policy", "max-min", "--jobs", "many"), "--jobs"),
        (("--policy", "max-min"), "--jobs"),
        (("--jobs", 5), "--policy"),
        (("--policy", "max-min", "--jobs", 5, "--types", 0), "--types"),
        (("--policy", "max-min", "--jobs", 5, "--repeat", 0), "--repeat"),
        (("--policy", "max-min", "--jobs", 5, "--seed", -1), "--seed"),
        (("--policy", "max-min", "--jobs", 5, "--gpus", 2), "2 GPUs are too few for 3 types"),
        (("--policy", "max-min", "--jobs", 5, "--gangs", "0:1"), "gangs"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(options: tuple[object, ...], refusal: str) -> None:
    assert refusal in poise("bench", "solve", *options).refusal


def test_a_wrong_measurement_gets_the_right_one() -> None:
    assert "solve" in poise("bench", "slove").refusal


def test_help_has_an_example() -> None:
    said = poise("bench", "solve", "--help")
    assert (said.code, said.err) == (0, "")
    assert "poise bench solve --policy max-min --jobs 2048" in said.out
