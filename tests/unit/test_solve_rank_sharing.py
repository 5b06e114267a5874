"""GPUs shared out by rank, worked by hand. A task takes 1 s on the first type and 3 s on the second."""

from poise.scheduler.model.micro_batches import Mix, Tasks
from poise.scheduler.solve.rank_sharing import GpuSupply, Ownership, ShareRequest, computes_as_fast, share_out

NEAR = GpuSupply((4, 4), (4, 4), 2)
BOTH = (0, 1)


def tasks(count: int, far: float = 0.0) -> Tasks:
    """Synchronisation takes longer by `far` where GPUs are far apart."""
    return Tasks(count, (1.0, 3.0), ((0.0, far, far),) * 2, 1)


def shared(requests: list[ShareRequest], left: list[int], ground: GpuSupply = NEAR) -> list[Mix | None]:
    return [mix for _, mix in share_out(requests, left, ground)]


def test_a_gang_takes_gpus_of_the_first_type_that_has_enough_or_nothing() -> None:
    left = [1, 3]
    assert shared([ShareRequest(0, 2, BOTH), ShareRequest(1, 2, BOTH), ShareRequest(2, 1, BOTH)], left) == [
        (0, 2),
        None,
        (1, 0),
    ]
    assert left == [0, 1]


def test_who_divides_takes_the_fewest_gpus_on_which_its_round_is_shortest() -> None:
    assert shared([ShareRequest(0, 1, BOTH, tasks(4))], [2, 2]) == [(2, 0)]
    assert shared([ShareRequest(0, 1, BOTH, tasks(4))], [1, 2]) == [(1, 1)]
    assert shared([ShareRequest(0, 1, BOTH, tasks(8))], [2, 2]) == [(2, 2)]


def test_what_is_left_goes_down_and_the_rest_are_not_asked_once_nothing_is() -> None:
    requests = [ShareRequest(0, 1, BOTH, tasks(8)), ShareRequest(1, 1, BOTH), ShareRequest(2, 1, BOTH)]
    assert shared(requests, [1, 1]) == [(1, 1)]


def test_single_tasks_take_the_best_gpus_as_far_as_they_go() -> None:
    left = [2, 3]
    assert shared([ShareRequest(0, 1, BOTH, tasks(8), single=4)], left) == [(2, 2)]
    assert left == [0, 1]
    assert shared([ShareRequest(0, 1, (0,), tasks(8), single=4)], [0, 3]) == [None]


def test_what_is_lent_is_in_the_pot_and_what_is_own_is_added_when_its_turn_comes() -> None:
    lent = ShareRequest(1, 2, BOTH, has=(2, 0))
    assert shared([ShareRequest(0, 2, BOTH), lent], [2, 0]) == [(2, 0)]
    own = lent._replace(title=Ownership.OWN)
    assert shared([ShareRequest(0, 2, BOTH), own], [0, 2]) == [(0, 2)]
    assert shared([ShareRequest(0, 4, BOTH), own], [0, 2]) == [None, (2, 0)]


def test_who_has_what_it_would_be_as_fast_on_keeps_it() -> None:
    """On two of the second type a round of 2 takes 3 s, and on one of the first 2."""
    assert shared([ShareRequest(0, 1, BOTH, tasks(4), has=(2, 0))], [4, 0]) == [(4, 0)]
    assert shared([ShareRequest(0, 1, BOTH, tasks(4), has=(2, 0))], [3, 0]) == [(2, 0)]
    assert shared([ShareRequest(0, 1, BOTH, tasks(2), has=(0, 2))], [1, 2]) == [(1, 0)]
    assert shared([ShareRequest(0, 2, (1, 0), has=(0, 2))], [2, 2]) == [(0, 2)]


def test_gang_moves_to_a_type_that_stands_before_its_own() -> None:
    assert shared([ShareRequest(0, 2, (0, 1), has=(0, 2))], [2, 2]) == [(2, 0)]
    assert shared([ShareRequest(0, 2, (0, 1), has=(0, 2))], [1, 2]) == [(0, 2)]
    assert shared([ShareRequest(0, 2, (0, 1), has=(0, 2))], [1, 1]) == [None]


def test_who_owns_gpus_and_exchanges_them_leaves_the_old_ones() -> None:
    left = [2, 0]
    assert shared([ShareRequest(0, 1, BOTH, tasks(2), has=(0, 2), title=Ownership.OWN)], left) == [(2, 0)]
    assert left == [0, 2]


def test_where_distance_costs_more_than_it_brings_gpus_close_together_are_enough() -> None:
    """8 tasks take 4 s on two GPUs close together, and on four that are not 2 s and the distance."""
    apart = GpuSupply((4, 0), (2, 0), 2)
    assert shared([ShareRequest(0, 1, BOTH, tasks(8, far=1.5))], [4, 0], apart) == [(4, 0)]
    assert shared([ShareRequest(0, 1, BOTH, tasks(8, far=2.5))], [4, 0], apart) == [(2, 0)]


def test_a_round_is_computed_as_fast_but_for_rounding() -> None:
    assert computes_as_fast(tasks(4), (2, 0), (2, 2))
    assert not computes_as_fast(tasks(4), (1, 1), (2, 2))
    assert not computes_as_fast(tasks(4), (0, 0), (2, 2))
