"""Causes of failure, and whether each is worth a retry (docs/algorithms/philly.md)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.lab.traces.formats.philly import UNKNOWN_CAUSE
from poise.lab.traces.philly_shape import CAUSES, FailureCause
from poise.scheduler.model.failures import CATEGORIES, Verdict, category_of, verdict

NAMES = [name for each in CATEGORIES for name in (each.name, *each.aliases)]

PUBLISHED = {
    "CPU out of memory": Verdict.UNKNOWN,
    "Incorrect inputs": Verdict.HOPELESS,
    "Semantic error": Verdict.HOPELESS,
    "Core dump": Verdict.UNKNOWN,
    "Invalid mem access": Verdict.UNKNOWN,
    "Model ckpt error": Verdict.TRANSIENT,
    "CUDA failure": Verdict.UNKNOWN,
    "Syntax error": Verdict.HOPELESS,
    "No signature": Verdict.UNKNOWN,
    "GPU ECC error": Verdict.TRANSIENT,
    "Output node error": Verdict.HOPELESS,
    "Traceback from crash": Verdict.UNKNOWN,
    "MPI error": Verdict.TRANSIENT,
    "GPU out of memory": Verdict.HOPELESS,
    "MPI runtime failure": Verdict.TRANSIENT,
    "Permission error": Verdict.HOPELESS,
    "Import error": Verdict.HOPELESS,
    "Job preempted": Verdict.TRANSIENT,
    "CUDA init failed": Verdict.TRANSIENT,
    "Model diverged": Verdict.UNKNOWN,
    "CUDA ver. mismatch": Verdict.HOPELESS,
}
"""Causes as Philly's table writes them."""


@pytest.mark.parametrize(("cause", "want"), PUBLISHED.items())
def test_verdict_of_a_published_cause(cause: str, want: Verdict) -> None:
    assert category_of(cause) is not None
    assert verdict(cause) is want


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_every_cause_of_a_synthetic_trace_is_known_by_its_own_name(cause: FailureCause) -> None:
    found = category_of(cause.name)
    assert found is not None
    assert found.name == cause.name


def test_published_causes_and_those_of_synthetic_traces_are_the_same() -> None:
    assert {each.name for each in CAUSES} == {found.name for cause in PUBLISHED if (found := category_of(cause))}


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        ("cuda_version_mismatch", "cuda-version-mismatch"),
        ("Mismatch of CUDA versions", "cuda-version-mismatch"),
        ("SyntaxError", "syntax-error"),
        ("ImportError", "import-error"),
        ("CUDA OOM", "gpu-out-of-memory"),
        ("GPU OOM", "gpu-out-of-memory"),
        ("OOM", "cpu-out-of-memory"),
        ("GPU ECC errors", "gpu-ecc-error"),
        ("segfault", "invalid-memory-access"),
        ("  Job   PREEMPTED. ", "job-preempted"),
        ("CUDA initialization failed", "cuda-init-failed"),
    ],
)
def test_a_cause_is_recognised_whatever_its_spelling(cause: str, name: str) -> None:
    found = category_of(cause)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("cause", ["", "died", UNKNOWN_CAUSE, "error", "the machine caught fire", "CUDA"])
def test_a_cause_that_says_nothing_is_retried_a_fixed_number_of_times(cause: str) -> None:
    assert verdict(cause) is Verdict.UNKNOWN


def test_no_two_categories_answer_to_one_name() -> None:
    for each in CATEGORIES:
        for name in (each.name, *each.aliases):
            assert category_of(name) is each, name


@given(st.sampled_from(NAMES), st.sampled_from("-_ ./,"), st.sampled_from((str.upper, str.lower, str.title, str.swapcase)))
def test_case_and_punctuation_change_no_verdict(name: str, mark: str, case: object) -> None:
    assert callable(case)
    assert verdict(case(name.replace("-", mark).replace(" ", mark))) is verdict(name)


@given(st.text())
def test_any_text_has_a_verdict(cause: str) -> None:
    assert verdict(cause) in Verdict
