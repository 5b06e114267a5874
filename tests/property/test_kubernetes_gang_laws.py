"""Laws of gangs of pods: the order of events does not matter, nothing is left over, every pod is in one gang."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.gangs import Gang, GangIndex, Preempts
from poise.service.backends.kubernetes.objects import Owner, PodInfo
from poise.service.backends.kubernetes.owners import OwnerInfo, OwnerPhase, PodTemplate
from poise.service.backends.kubernetes.places import placement_of

GROUP = "scheduling.x-k8s.io/pod-group"
KINDS = {"Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1"}
PARENTS = {"Job": "JobSet", "JobSet": "TrainJob", "TrainJob": "Workflow"}


def reference(kind: str, number: int) -> Owner:
    return Owner(KINDS.get(kind, "argoproj.io/v1alpha1"), kind, f"{kind.lower()}-{number}", f"uid-{kind.lower()}-{number}")


def a_pod(
    name: str,
    *,
    owner: Owner | None = None,
    gpus: int = 1,
    node: str = "",
    phase: str = "Pending",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    scheduler: str = "poise",
    ending: bool = False,
    created: float = 0.0,
) -> PodInfo:
    return PodInfo(
        "default", name, f"uid-{name}", "1", labels or {}, annotations or {}, owner, scheduler, node, gpus, phase, "", "",
        ending, False, {}, "", (), created,
    )  # fmt: skip


@dataclass(frozen=True)
class Scene:
    pods: tuple[PodInfo, ...]
    owners: tuple[OwnerInfo, ...]

    @property
    def events(self) -> list[PodInfo | OwnerInfo]:
        return [*self.pods, *self.owners]


@st.composite
def owners(draw: st.DrawFn, kind: str, number: int) -> OwnerInfo:
    parent = draw(st.none() | st.integers(0, 1))
    schedulers = st.sampled_from(["poise", "poise", "default-scheduler"])
    templates = st.builds(PodTemplate, st.sampled_from(["a", "b"]), st.integers(0, 3), st.integers(0, 2), schedulers)
    count = {"Job": 1, "JobSet": draw(st.integers(1, 2)), "TrainJob": 0}[kind]
    me = reference(kind, number)
    return OwnerInfo(
        kind=kind,
        namespace="default",
        name=me.name,
        uid=me.uid,
        path="",
        owner=None if parent is None else reference(PARENTS[kind], parent),
        suspended=draw(st.booleans()),
        templates=tuple(draw(st.lists(templates, min_size=count, max_size=count))),
        finished=draw(st.integers(0, 1)) if kind == "Job" else 0,
        state=draw(st.sampled_from([OwnerPhase.ACTIVE, OwnerPhase.COMPLETE])),
        ignores_disruption=draw(st.booleans()),
        queue=draw(st.integers(0, 5)) == 0,
        annotations={},
    )


@st.composite
def pods(draw: st.DrawFn, number: int) -> PodInfo:
    owner = draw(st.none() | st.builds(reference, st.sampled_from(["Job", "Job", "JobSet", "Workflow"]), st.integers(0, 3)))
    labels = draw(st.sampled_from([{}, {}, {}, {GROUP: "g"}, {GROUP: "jobset-0"}]))
    annotations = draw(
        st.sampled_from([{}, {}, {names.GANG: "h", names.GANG_SIZE: "2"}, {names.GANG: "h"}, {names.GANG_SIZE: "3"}])
    )
    return a_pod(
        f"p{number}",
        owner=owner,
        gpus=draw(st.sampled_from([0, 1, 1, 2])),
        node=draw(st.sampled_from(["", "n"])),
        phase=draw(st.sampled_from(["Pending", "Running", "Running", "Succeeded", "Failed"])),
        labels=labels,
        annotations=annotations,
        scheduler=draw(st.sampled_from(["poise", "poise", "poise", "default-scheduler"])),
        ending=draw(st.integers(0, 4)) == 0,
        created=float(draw(st.integers(0, 3))),
    )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Pods and owners, some of which are missing, and references to them."""
    there = [
        draw(owners(kind, number)) for kind, most in (("Job", 4), ("JobSet", 2), ("TrainJob", 2)) for number in range(most)
    ]
    kept = draw(st.sets(st.sampled_from([each.uid for each in there])))
    return Scene(
        tuple(draw(pods(number)) for number in range(draw(st.integers(0, 7)))),
        tuple(each for each in there if each.uid in kept),
    )


def put(index: GangIndex, events: Sequence[PodInfo | OwnerInfo]) -> None:
    for each in events:
        if isinstance(each, PodInfo):
            index.put_pod(each)
        else:
            index.put_owner(each)


def remove(index: GangIndex, each: PodInfo | OwnerInfo) -> None:
    if isinstance(each, PodInfo):
        index.remove_pod(each.key)
    else:
        index.remove_owner(each.uid)


def gangs_of(index: GangIndex) -> dict[str, Gang]:
    return {gang.key: gang for gang in index}


def indexed(scene: Scene) -> GangIndex:
    index = GangIndex()
    put(index, scene.events)
    return index


def take(index: GangIndex, known: dict[str, Gang]) -> None:
    """Keep a copy of the gangs by what is told of them."""
    for each in index.changed():
        if isinstance(each, str):
            del known[each]
        else:
            known[each.key] = each


@given(scenes(), st.randoms(use_true_random=False))
def test_events_in_any_order_give_the_same_gangs(scene: Scene, random: Random) -> None:
    """Also if some come twice, and whenever the gangs are looked at."""
    index, known = GangIndex(), dict[str, Gang]()
    for each in random.sample(again := scene.events * 2, len(again)):
        put(index, [each])
        if random.random() < 0.3:
            take(index, known)
    assert gangs_of(index) == gangs_of(indexed(scene))


@given(scenes(), st.randoms(use_true_random=False))
def test_what_is_told_adds_up_to_the_gangs_that_there_are(scene: Scene, random: Random) -> None:
    index, known = GangIndex(), dict[str, Gang]()
    changes = [(each, is_put) for each in scene.events for is_put in (True, False, True)]
    for each, is_put in random.sample(changes, len(changes)):
        if is_put:
            put(index, [each])
        else:
            remove(index, each)
        if random.random() < 0.3:
            take(index, known)
    take(index, known)
    assert known == gangs_of(index)


@given(scenes(), st.randoms(use_true_random=False))
def test_removing_everything_leaves_nothing(scene: Scene, random: Random) -> None:
    index = indexed(scene)
    index.changed()
    for each in random.sample(scene.events, len(scene.events)):
        remove(index, each)
    index.changed()
    assert [*index] == []
    assert {name: kept for name, kept in vars(index).items() if kept and name != "_scheduler"} == {}


@given(scenes())
def test_every_pod_of_ours_is_in_exactly_one_gang(scene: Scene) -> None:
    index = indexed(scene)
    listed = Counter(pod.key for gang in index for pod in gang.pods)
    for pod in scene.pods:
        is_ours = pod.scheduler == "poise" and not pod.is_over
        assert listed[pod.key] == (is_ours and not pod.ending)
        if is_ours:
            key = index.gang_of_pod(pod.key)
            assert key is not None
            gang = index.get(key)
            assert gang is not None
            assert pod.ending or pod in gang.pods


@given(scenes(), st.randoms(use_true_random=False))
def test_pods_stay_in_their_gangs_while_owners_are_deleted(scene: Scene, random: Random) -> None:
    index = indexed(scene)
    before = {pod.key: index.gang_of_pod(pod.key) for pod in scene.pods if pod.scheduler == "poise" and not pod.is_over}
    for owner in random.sample(scene.owners, len(scene.owners)):
        index.remove_owner(owner.uid)
        assert {key: index.gang_of_pod(key) for key in before} == before


@given(scenes())
def test_a_whole_gang_has_its_pods_and_a_preemptible_one_somebody_who_makes_them_again(scene: Scene) -> None:
    for gang in indexed(scene):
        if gang.is_whole:
            assert gang.size is not None
            assert gang.pods
        if gang.preempts is Preempts.SUSPEND:
            assert gang.owner is not None
            assert gang.owner.state is not OwnerPhase.GONE
        if gang.preempts is Preempts.EVICT:
            assert gang.owner is not None or all(pod.owner is not None for pod in gang.pods)


NODES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1)


@given(NODES, st.integers(1, 3), st.integers(0, 2), st.data())
def test_every_node_gets_exactly_the_pods_that_its_gpus_are_for(
    places: dict[str, int], gpus: int, helpers: int, data: st.DataObject
) -> None:
    slots = [node for node, count in places.items() for _ in range(count)]
    bound = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    workers = [
        a_pod(f"w{number}", gpus=gpus, node=node if is_bound else "")
        for number, (node, is_bound) in enumerate(zip(slots, bound, strict=True))
    ]
    everyone = data.draw(st.permutations([*workers, *(a_pod(f"h{number}", gpus=0) for number in range(helpers))]))
    gang = Gang("key-of-gang", "default", "g", "PodGroup", None, None, tuple(everyone), gpus, Preempts.NEVER, None, True)
    parts = [(node, count * gpus) for node, count in places.items()]
    got = placement_of(gang, parts)
    assert got is not None
    assert {*got} == {pod.key for pod in everyone if not pod.node}
    assert Counter(pod.node or got[pod.key] for pod in workers) == Counter(slots)
    assert all(got[pod.key] == parts[0][0] for pod in everyone if not pod.gpus)
    shuffled = Gang(
        "key-of-gang", "default", "g", "PodGroup", None, None, tuple(everyone[::-1]), gpus, Preempts.NEVER, None, True
    )
    assert placement_of(shuffled, parts) == got


@given(NODES, NODES, st.integers(1, 3))
def test_places_that_do_not_match_the_pods_are_refused(there: dict[str, int], wanted: dict[str, int], gpus: int) -> None:
    pods = tuple(a_pod(f"{node}{number}", gpus=gpus, node=node) for node, count in there.items() for number in range(count))
    gang = Gang("key-of-gang", "default", "g", "PodGroup", None, None, pods, gpus, Preempts.NEVER, None, True)
    got = placement_of(gang, [(node, count * gpus) for node, count in wanted.items()])
    assert got == ({} if there == wanted else None)
