"""Claims for just these nodes: where they are served, when a job is moved, and when it waits."""

from dataclasses import replace
from math import inf

from tests.builders import EVENTS, a_job, nodes, simulate
from tests.whims import a_plan, scripted

from poise.scheduler.model.action import Preempt, PreemptionCause
from poise.scheduler.model.cluster import NodeGpus, site_of
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Locality

TWO = (NodeGpus(0, 1), NodeGpus(2, 1))


def test_a_claim_with_a_site_is_served_on_just_these_nodes() -> None:
    story = simulate([a_job("a", gpus=2)], scripted({0.0: a_plan(Claim(0, site=TWO))}), nodes(4, 4, 4))
    assert site_of(story.runs[0].gpus) == TWO


def test_a_running_job_whose_site_is_the_same_goes_on() -> None:
    plans = {0.0: a_plan(Claim(0, site=TWO)), 5.0: a_plan(Claim(0, site=TWO))}
    story = simulate([a_job("a", gpus=2)], scripted(plans), nodes(4, 4, 4))
    assert story.preemptions == 0


def test_a_running_job_whose_site_is_another_one_is_moved_and_pays_the_restart() -> None:
    plans = {0.0: a_plan(Claim(0, site=TWO)), 5.0: a_plan(Claim(0, site=(NodeGpus(1, 2),)))}
    how = replace(EVENTS, restart_overhead=1.0)
    story = simulate([a_job("a", gpus=2)], scripted(plans), nodes(4, 4, 4), settings=how)
    assert [(now, action.why) for now, action in story.actions(Preempt)] == [(5, PreemptionCause.MOVED)]
    assert [site_of(run.gpus) for run in story.runs] == [TWO, (NodeGpus(1, 2),)]
    assert story.finishes == {"a": 12}


def test_two_jobs_may_change_places_in_one_plan() -> None:
    jobs = [a_job("a", gpus=4), a_job("b", gpus=4)]
    left, right = (NodeGpus(0, 4),), (NodeGpus(1, 4),)
    plans = {
        0.0: a_plan(Claim(0, site=left), Claim(1, site=right)),
        5.0: a_plan(Claim(0, site=right), Claim(1, site=left)),
    }
    story = simulate(jobs, scripted(plans), nodes(4, 4))
    assert [site_of(run.gpus) for run in story.runs_of("a")] == [left, right]
    assert [site_of(run.gpus) for run in story.runs_of("b")] == [right, left]


def test_a_site_that_is_taken_is_waited_for_though_others_are_free() -> None:
    jobs = [a_job("first", gpus=3, seconds=20), a_job("second", gpus=2)]
    second = Claim(1, site=(NodeGpus(0, 2),))
    plans = {0.0: a_plan(Claim(0, site=(NodeGpus(0, 3),)), second), 20.0: a_plan(second)}
    story = simulate(jobs, scripted(plans), nodes(4, 4))
    assert story.starts == {"first": 0, "second": 20}


def test_a_move_to_a_place_that_is_taken_leaves_the_job_where_it_is() -> None:
    jobs = [a_job("a", gpus=4), a_job("b", gpus=4)]
    plans = {
        0.0: a_plan(Claim(0, site=(NodeGpus(0, 4),)), Claim(1, site=(NodeGpus(1, 4),))),
        5.0: a_plan(Claim(0, site=(NodeGpus(1, 4),))),
    }
    story = simulate(jobs, scripted(plans), nodes(4, 4))
    assert story.preemptions == 0
    assert story.finishes == {"a": 10, "b": 10}


def test_a_site_is_taken_at_its_word_by_jobs_that_wait_for_locality_and_by_the_defragmentation() -> None:
    """Nobody is moved to make room for a claim that insists on a place of its own."""
    jobs = [a_job("small", seconds=20), a_job("gang", at=5, gpus=4)]
    plans = {
        0.0: a_plan(Claim(0, site=(NodeGpus(0, 1),))),
        5.0: a_plan(Claim(1, Locality.PACKED, site=(NodeGpus(0, 4),))),
        20.0: a_plan(Claim(1, site=(NodeGpus(0, 2), NodeGpus(1, 2)))),
    }
    how = replace(EVENTS, packed_wait=1e6, defragment=1.0)
    story = simulate(jobs, scripted(plans), nodes(4, 4), placement="consolidate", settings=how, until=inf)
    assert story.preemptions == 0
    assert site_of(story.runs_of("gang")[0].gpus) == (NodeGpus(0, 2), NodeGpus(1, 2))
