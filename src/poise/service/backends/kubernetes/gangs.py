"""Which pods belong together: gangs of pods that others have created, and what Poise may do with them.

Pure: what was read of pods and of their owners goes in, gangs come out, and an event costs the size of one gang. A pod is
in exactly one gang, the first of these that applies:

1. the pod group that a known label or annotation names (coscheduling, Volcano, Kueue), unless that is only another name of
   the owner, as Kubeflow Trainer and Volcano give them
2. its topmost owner: pod → Job → JobSet → TrainJob
3. the gang that its annotation `poise.run/gang` names
4. itself

Kubernetes' own scheduling group (`spec.schedulingGroup`) is not read yet: it changes with every release.

An owner may become known after its pods, or go before them. Until all owners of a chain are known its gang is not whole; an
owner that was deleted is remembered while something refers to it, so that a gang keeps its key as long as it has pods.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.objects import ObjectKey, Owner, PodInfo
from poise.service.backends.kubernetes.owners import (
    KUEUE,
    KUEUE_LABELS,
    OwnerInfo,
    OwnerPhase,
    PodTemplate,
    group_of,
    is_known_kind,
)

GROUP_NAMES = (
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
    "pod-group.scheduling.sigs.k8s.io/name",
    "scheduling.k8s.io/group-name",
    "kueue.x-k8s.io/pod-group-name",
)
GROUP_SIZES = (names.GANG_SIZE, "pod-group.scheduling.sigs.k8s.io/min-available")

REMAKERS = {("apps", "ReplicaSet"), ("apps", "StatefulSet"), ("apps", "DaemonSet"), ("", "ReplicationController")}
"""Controllers that make a pod again however it ended, by group and kind."""

DEEPEST = 8  # owners in a chain: references are written by users and might run in a circle
_FIT = re.compile(r"[A-Za-z0-9-]{1,40}")
T = TypeVar("T")


class Preempts(StrEnum):
    """How a gang can be made to leave: by suspending its owner, by evicting its pods, or not at all."""

    SUSPEND = "suspend"
    EVICT = "evict"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods that are bound together or not at all.

    key        for ever the same for this gang, once its owner is known; fit for a submission
    kind       Job, JobSet, TrainJob, PodGroup or Pod
    owner      the topmost one; None: it has none, or not all owners are known yet
    size       number of pods that it needs; None: not known
    workers    those of them that have GPUs; None: not known
    pods       that are not over and not being deleted, oldest first
    gpus       of each pod that has GPUs; helpers, such as launchers, have none
    finished   workers that have succeeded and are not made again
    problem    why Poise does not schedule it, in one sentence
    is_whole   all pods exist that it still needs, bound or not, and none is gated
    """

    key: str
    namespace: str
    name: str
    kind: str
    owner: OwnerInfo | None
    size: int | None
    pods: tuple[PodInfo, ...]
    gpus: int
    preempts: Preempts
    problem: str | None
    is_whole: bool
    workers: int | None = None
    finished: int = 0

    @property
    def what(self) -> str:
        """Its kind and name, for people."""
        return f"{self.kind} {self.name}"

    def annotation(self, name: str) -> str | None:
        """Return what its pods, or else its owner, say in an annotation of Poise."""
        said = (pod.annotations[name] for pod in self.pods if name in pod.annotations)
        return next(said, None if self.owner is None else self.owner.annotations.get(name))


class GangProblem(NamedTuple):
    """Why a gang is not scheduled: a reason code, and a sentence.

    `rejected`: other nodes would mend it, which cluster autoscalers are told; `cannot-run`: they would not.
    """

    code: str
    text: str


class _GroupKind(StrEnum):
    OWNER = "owner"
    GROUP = "group"
    POD = "pod"


class _GroupId(NamedTuple):
    """What pods have in common that are a gang. The namespace is part of it: a pod can claim owners of other namespaces."""

    sort: _GroupKind
    namespace: str
    source: str  # label or annotation that names it
    name: str  # uid of the owner; name of the group; name and uid of the pod

    @property
    def suffix(self) -> str:
        return hashlib.sha256("\0".join(self).encode()).hexdigest()[:12]


@dataclass(slots=True)
class _Members:
    """Pods of a gang. `live`: those that are not over; `anchor`: age and uid of the oldest one since there were none."""

    pods: set[ObjectKey] = field(default_factory=set)
    live: set[ObjectKey] = field(default_factory=set)
    anchor: tuple[float, str] | None = None


@dataclass(slots=True)
class _Draft:
    """A gang that is being made."""

    id: _GroupId
    kind: str
    name: str
    pods: tuple[PodInfo, ...]
    problem: str | None = None
    owner: OwnerInfo | None = None
    size: int | None = None
    workers: int | None = None
    gpus: int = 0
    finished: int = 0
    preempts: Preempts = Preempts.NEVER
    is_whole: bool = False

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name}"

    def refuse(self, text: str) -> None:
        """Note what is wrong with it; what was noted first is what people are told."""
        self.problem = self.problem or f"{self.what}: {text}"

    def gang(self, key: str) -> Gang:
        return Gang(
            key, self.id.namespace, self.name, self.kind, self.owner, self.size, self.pods, self.gpus, self.preempts,
            self.problem,
            self.is_whole and bool(self.pods) and not any(pod.is_gated for pod in self.pods), self.workers, self.finished,
        )  # fmt: skip


class GangIndex:
    """All gangs of one scheduler. Events may come in any order; gangs are made anew when they are next asked for.

    An event only notes which groups have changed (`_dirty`), and `_refresh` makes their gangs. Every pod of `_pods` is in
    `_group_of_pod`, and a member of that group; every group in `_groups` has pods; `_by_key` has the gangs of `_made`.
    """

    def __init__(self, scheduler: str = names.SCHEDULER) -> None:
        self._scheduler = scheduler
        self._pods: dict[ObjectKey, PodInfo] = {}
        self._group_of_pod: dict[ObjectKey, _GroupId] = {}
        self._groups: dict[_GroupId, _Members] = {}
        self._group_by_suffix: dict[str, _GroupId] = {}  # groups that labels or annotations name, by end of key
        self._open: set[str] = set()  # keys of gangs that have runs
        self._owners: dict[str, OwnerInfo] = {}  # by uid
        self._gone: set[str] = set()  # owners that were deleted before what they own
        self._children: defaultdict[str, set[str]] = defaultdict(set)  # owners by the uid of their owner
        self._pods_of_owner: defaultdict[str, set[ObjectKey]] = defaultdict(set)  # pods by the uid of their owner
        self._dirty: dict[_GroupId, None] = {}
        self._made: dict[_GroupId, Gang] = {}
        self._by_key: dict[str, Gang] = {}
        self._changed_keys: dict[str, None] = {}
        self._told: set[str] = set()

    def __iter__(self) -> Iterator[Gang]:
        """Iterate over a copy."""
        self._refresh()
        return iter([*self._by_key.values()])

    def __len__(self) -> int:
        self._refresh()
        return len(self._by_key)

    def get(self, key: str) -> Gang | None:
        """Return a gang; None: there is none any more."""
        self._refresh()
        return self._by_key.get(key)

    def gang_of_pod(self, key: ObjectKey) -> str | None:
        """Return the key of a pod's gang; None: it is not Poise's, or its gang is over."""
        self._refresh()
        group = self._group_of_pod.get(key)
        return None if group is None or (gang := self._made.get(group)) is None else gang.key

    def changed(self) -> list[Gang | str]:
        """Return the gangs that have changed since the last call; of those that are gone, the key."""
        self._refresh()
        news: list[Gang | str] = []
        for key in self._changed_keys:
            gang = self._by_key.get(key)
            if gang is not None:
                news.append(gang)
                self._told.add(key)
            elif key in self._told:
                news.append(key)
                self._told.discard(key)
        self._changed_keys.clear()
        return news

    # Events

    def put_pod(self, pod: PodInfo) -> None:
        """Take a pod that is new, or that has changed."""
        before = self._pods.get(pod.key)
        if before == pod:
            return
        if before is not None and (before.uid, before.owner) != (pod.uid, pod.owner):
            self.remove_pod(pod.key)  # another pod has taken its name, or it was orphaned
        if pod.owner is not None and is_known_kind(pod.owner):
            self._pods_of_owner[pod.owner.uid].add(pod.key)
        group = self._group_of(pod)
        if group is None:
            self.remove_pod(pod.key)
            return
        self._pods[pod.key] = pod
        self._move(pod, group)

    def remove_pod(self, key: ObjectKey) -> None:
        """Forget a pod that does not exist any more."""
        pod = self._pods.pop(key, None)
        if pod is None:
            return
        self._leave(key)
        if pod.owner is not None:
            self._release(pod.owner.uid, self._pods_of_owner, key)

    def put_owner(self, owner: OwnerInfo) -> None:
        """Take an owner that is new, or that has changed."""
        before = self._owners.get(owner.uid)
        if before == owner and owner.uid not in self._gone:
            return
        self._gone.discard(owner.uid)
        if before is not None:
            self._mark_tree(before)
            if before.owner is not None and before.owner != owner.owner:
                self._release(before.owner.uid, self._children, owner.uid)
        self._owners[owner.uid] = owner
        if owner.owner is not None and is_known_kind(owner.owner):
            self._children[owner.owner.uid].add(owner.uid)
        self._mark_tree(owner)
        if before is None or before.owner != owner.owner or before.name != owner.name:
            for key in [*self._pods_below(owner.uid)]:
                pod = self._pods[key]
                group = self._group_of(pod)
                assert group is not None
                self._move(pod, group)

    def remove_owner(self, uid: str) -> None:
        """Record that an owner was deleted. It is remembered while pods or owners refer to it."""
        owner = self._owners.get(uid)
        if owner is None:
            return
        self._mark_tree(owner)
        self._gone.add(uid)
        self._drop_if_unused(uid)

    def open(self, key: str) -> None:
        """Record that a gang has a run: its pods that have succeeded are part of it, even if none is left that is bound."""
        self._open.add(key)
        self._mark_group(key)

    def close(self, key: str) -> None:
        """Record that the run of a gang is over: what is left of its pods is no part of another gang of its name."""
        self._open.discard(key)
        self._mark_group(key)

    # Membership

    def _group_of(self, pod: PodInfo) -> _GroupId | None:
        """Say what a pod belongs to; None: it is of no concern."""
        source = next((each for each in GROUP_NAMES if pod.labels.get(each) or pod.annotations.get(each)), None)
        owner = pod.owner if is_known_kind(pod.owner) else None
        if source is not None:
            name = pod.labels.get(source) or pod.annotations[source]
            if owner is None or not self._is_alias(name, owner, pod.namespace):
                return _GroupId(_GroupKind.GROUP, pod.namespace, source, name)
        if owner is not None:
            return _GroupId(_GroupKind.OWNER, pod.namespace, "", self._top(owner.uid, pod.namespace))
        if pod.annotations.get(names.GANG):
            return _GroupId(_GroupKind.GROUP, pod.namespace, names.GANG, pod.annotations[names.GANG])
        if pod.scheduler != self._scheduler:
            return None
        return _GroupId(_GroupKind.POD, pod.namespace, "", f"{pod.name}/{pod.uid}")

    def _is_alias(self, group: str, owner: Owner, namespace: str) -> bool:
        """Whether a group is one of the owners by another name: Trainer names it alike, Volcano by the owner's uid."""
        step: Owner | None = owner
        for _ in range(DEEPEST):
            if step is None or not is_known_kind(step):
                return False
            if group in (step.name, f"podgroup-{step.uid}"):
                return True
            found = self._owner(step.uid, namespace)
            step = None if found is None else found.owner
        return False

    def _owner(self, uid: str, namespace: str) -> OwnerInfo | None:
        found = self._owners.get(uid)
        return found if found is not None and found.namespace == namespace else None

    def _top(self, uid: str, namespace: str) -> str:
        """Return the uid of the topmost owner that is referred to, known or not."""
        for _ in range(DEEPEST):
            found = self._owner(uid, namespace)
            if found is None or found.owner is None or not is_known_kind(found.owner):
                break
            uid = found.owner.uid
        return uid

    def _move(self, pod: PodInfo, group: _GroupId) -> None:
        if self._group_of_pod.get(pod.key, group) != group:
            self._leave(pod.key)
        self._group_of_pod[pod.key] = group
        members = self._groups.get(group)
        if members is None:
            members = self._groups[group] = _Members()
            if group.sort is _GroupKind.GROUP:
                self._group_by_suffix[group.suffix] = group
        members.pods.add(pod.key)
        if pod.is_over:
            members.live.discard(pod.key)
        else:
            members.live.add(pod.key)
            age = pod.created, pod.uid
            members.anchor = age if members.anchor is None else min(members.anchor, age)
        self._settle(group, members)

    def _leave(self, key: ObjectKey) -> None:
        group = self._group_of_pod.pop(key)
        members = self._groups[group]
        members.pods.discard(key)
        members.live.discard(key)
        self._settle(group, members)

    def _settle(self, group: _GroupId, members: _Members) -> None:
        if not members.live:
            members.anchor = None  # new pods under the same name are another gang
        if not members.pods:
            del self._groups[group]
            self._group_by_suffix.pop(group.suffix, None)
        self._dirty[group] = None

    def _mark_group(self, key: str) -> None:
        group = self._group_by_suffix.get(key.rpartition("-")[2])
        if group is not None:
            self._dirty[group] = None

    def _pods_below(self, uid: str, depth: int = 0) -> Iterator[ObjectKey]:
        yield from (key for key in self._pods_of_owner.get(uid, ()) if key in self._pods)
        if depth < DEEPEST:
            for child in self._children.get(uid, ()):
                yield from self._pods_below(child, depth + 1)

    def _mark_tree(self, owner: OwnerInfo) -> None:
        """Have the gangs made anew that know of an owner: its own, and groups that its pods are in."""
        self._dirty[_GroupId(_GroupKind.OWNER, owner.namespace, "", self._top(owner.uid, owner.namespace))] = None
        self._dirty |= {self._group_of_pod[key]: None for key in self._pods_below(owner.uid)}

    def _release(self, owner: str, table: dict[str, set[T]], what: T) -> None:
        """Note that something does not refer to an owner any more."""
        found = table.get(owner)
        if found is None:
            return
        found.discard(what)
        if not found:
            del table[owner]
        self._drop_if_unused(owner)

    def _drop_if_unused(self, uid: str) -> None:
        if uid not in self._gone or uid in self._pods_of_owner or uid in self._children:
            return
        self._gone.discard(uid)
        owner = self._owners.pop(uid)
        if owner.owner is not None:
            self._release(owner.owner.uid, self._children, uid)

    # Making gangs

    def _refresh(self) -> None:
        for group in self._dirty:
            old, new = self._made.pop(group, None), self._make(group)
            if old is not None and (new is None or new.key != old.key):
                del self._by_key[old.key]
                self._changed_keys[old.key] = None
            if new is not None:
                self._made[group] = self._by_key[new.key] = new
                if new != old:
                    self._changed_keys[new.key] = None
        self._dirty.clear()

    def _make(self, group: _GroupId) -> Gang | None:
        members = self._groups.get(group, _Members())
        everyone = [self._pods[key] for key in members.pods]
        ours = sorted((pod for pod in everyone if pod.scheduler == self._scheduler), key=_age)
        pods = tuple(pod for pod in ours if not pod.is_over and not pod.ending)
        is_there = any(not pod.is_over for pod in ours)
        top = self._owner(group.name, group.namespace) if group.sort is _GroupKind.OWNER else None
        if top is not None:
            if not is_there and not self._is_awaited(top):
                return None
            draft = self._owned(_Draft(group, top.kind, top.name, pods), top)
        elif not is_there:
            return None
        elif group.sort is _GroupKind.OWNER:
            draft = self._awaited(_Draft(group, "", "", pods), ours[0])
        elif group.sort is _GroupKind.GROUP:
            draft = self._grouped(_Draft(group, "PodGroup", group.name, pods), ours)
        else:
            draft = self._single(_Draft(group, "Pod", ours[0].name, pods))
        foreign = min(
            (pod for pod in everyone if pod.scheduler != self._scheduler and not pod.is_over), key=_age, default=None
        )
        # Of owners, helpers of another scheduler are their own business: an initializer that runs before, for example.
        if foreign is not None and (foreign.gpus or group.sort is _GroupKind.GROUP):
            draft.refuse(
                f"its pod {foreign.name} has schedulerName {foreign.scheduler!r}, others {self._scheduler!r};"
                " give all its pods the same"
            )
        return draft.gang(self._key_of(group, members, ours))

    def _is_awaited(self, owner: OwnerInfo) -> bool:
        """Whether an owner without pods is a gang: the topmost one, whose pods would be Poise's to place."""
        is_top = self._top(owner.uid, owner.namespace) == owner.uid
        return (
            is_top and owner.uid not in self._gone and any(each.scheduler == self._scheduler for each in self._plan(owner))
        )

    def _key_of(self, group: _GroupId, members: _Members, ours: Sequence[PodInfo]) -> str:
        if group.sort is _GroupKind.OWNER:
            return f"{_fit(group.name)}-{group.suffix}"
        # The oldest pod may have gone since; Poise has written the key on those that it bound. The end of it shows that
        # it is this group's, as users can write annotations.
        for key in sorted(
            {pod.annotations[names.GANG_KEY] for pod in ours if names.GANG_KEY in pod.annotations and self._is_part(pod)}
        ):
            anchor, _, suffix = key.rpartition("-")
            if suffix == group.suffix and _FIT.fullmatch(anchor):
                return key
        assert members.anchor is not None
        return f"{_fit(members.anchor[1])}-{group.suffix}"

    def _is_part(self, pod: PodInfo) -> bool:
        """Whether a pod was bound for the gang that its group is now; others are left from a former one."""
        if pod.is_over:
            return pod.annotations.get(names.GANG_KEY) in self._open
        return bool(pod.node) and not pod.ending

    def _plan(self, top: OwnerInfo) -> list[PodTemplate]:
        """Return the pods that an owner makes; those of a TrainJob are made by its JobSet."""
        return [*top.templates] or [each for child in self._children_of(top) for each in child.templates]

    def _children_of(self, owner: OwnerInfo) -> list[OwnerInfo]:
        """Return the owners that an owner controls; not those that were deleted, in whose place there may be others."""
        uids = sorted(uid for uid in self._children.get(owner.uid, ()) if uid not in self._gone or owner.uid in self._gone)
        return [found for uid in uids if (found := self._owner(uid, owner.namespace)) is not None]

    def _below(self, top: OwnerInfo, depth: int = 0) -> Iterator[OwnerInfo]:
        yield top
        if depth < DEEPEST:
            for child in self._children_of(top):
                yield from self._below(child, depth + 1)

    def _awaited(self, draft: _Draft, pod: PodInfo) -> _Draft:
        """Make a gang of which not all owners are known yet: nothing is done with it."""
        missing = pod.owner
        while missing is not None and (found := self._owner(missing.uid, pod.namespace)) is not None:
            missing = found.owner
        assert missing is not None
        draft.kind, draft.name = missing.kind, missing.name
        draft.gpus = max((each.gpus for each in draft.pods), default=0)
        return draft

    def _owned(self, draft: _Draft, top: OwnerInfo) -> _Draft:
        """Make the gang of an owner: how many pods it has, and of which kind, is known from their templates."""
        is_gone = top.uid in self._gone
        draft.owner = replace(top, state=OwnerPhase.GONE) if is_gone else top
        plan = self._plan(top)
        ours = [each for each in plan if each.scheduler == self._scheduler]
        mine = {each.name for each in ours}
        # Helpers that are made once others are ready cannot be waited for; they are bound when they come.
        counted_in = [each for each in ours if each.gpus or not mine & {*each.after}]
        workers = sum(each.pods for each in counted_in if each.gpus)
        helpers = sum(each.pods for each in counted_in if not each.gpus)
        family = [*self._below(top)]
        jobs = [each for each in family if each.kind == "Job" and each.scheduler == self._scheduler]
        done = sum(each.finished for each in jobs if each.gpus), sum(each.finished for each in jobs if not each.gpus)
        if plan:
            draft.size, draft.workers, draft.finished = workers + helpers, workers, min(workers, done[0])
            there = sum(pod.gpus > 0 for pod in draft.pods)
            needed = workers - draft.finished, helpers - min(helpers, done[1])
            draft.is_whole = there >= needed[0] and len(draft.pods) - there >= needed[1]
        gpus = [pod.gpus for pod in draft.pods] + [each.gpus for each in ours]
        draft.gpus = max(gpus, default=0)
        if any(each.queue for each in family):
            _refuse_kueue(draft)
        _judge_plan(draft, plan, self._scheduler)
        if draft.size is not None:
            _judge_said_size(draft)
        is_never = _judge(draft, self._preemption_said(draft), gpus, is_complete=bool(plan))
        if is_never or is_gone:
            draft.preempts = Preempts.NEVER
        elif top.owner is None or (group_of(top.owner), top.owner.kind) == ("batch", "CronJob"):
            draft.preempts = Preempts.SUSPEND  # a CronJob makes Jobs, and leaves them alone
        elif jobs and all(each.ignores_disruption for each in jobs):
            draft.preempts = Preempts.EVICT  # `suspend` is its owner's to set
        return draft

    def _grouped(self, draft: _Draft, ours: Sequence[PodInfo]) -> _Draft:
        """Make a gang that labels or annotations have named: its pods say how many they are."""
        pods = draft.pods
        if draft.id.source.startswith(KUEUE):
            _refuse_kueue(draft)
        draft.size = _said_size(draft)
        # Pods of a former gang of this name may still be there: what was bound for the same job is of this one.
        jobs = {pod.annotations[names.JOB] for pod in ours if self._is_part(pod) and names.JOB in pod.annotations}
        done = [pod for pod in ours if pod.phase == "Succeeded" and pod.annotations.get(names.JOB) in jobs]
        draft.finished = sum(pod.gpus > 0 for pod in done)
        draft.gpus = max((pod.gpus for pod in (*pods, *done)), default=0)
        if draft.size is not None:
            if len(pods) > draft.size:
                draft.refuse(
                    f"it has {len(pods)} pods, but {names.GANG_SIZE} says {draft.size};"
                    " correct the size, or give other gangs other names"
                )
            draft.is_whole = len(pods) + len(done) >= draft.size
            if draft.is_whole:
                draft.workers = draft.finished + sum(pod.gpus > 0 for pod in pods)
        self._judge_pods(draft)
        return draft

    def _single(self, draft: _Draft) -> _Draft:
        """Make a gang of one pod."""
        draft.size, draft.is_whole = 1, True
        draft.gpus = max((pod.gpus for pod in draft.pods), default=0)
        draft.workers = 1
        said = next((text for pod in draft.pods if (text := pod.annotations.get(names.GANG_SIZE, "1")) != "1"), None)
        if said is not None:
            draft.refuse(f"it has {names.GANG_SIZE} {said[:40]!r}, but no name of a gang; set {names.GANG} as well")
        self._judge_pods(draft)
        return draft

    def _judge_pods(self, draft: _Draft) -> None:
        """Judge a gang that has no owner of its own, and say how its pods can be made to leave."""
        pods = draft.pods
        owners = [found for pod in pods if pod.owner and (found := self._owner(pod.owner.uid, pod.namespace)) is not None]
        if any(each.queue for owner in owners for each in (owner, *self._above(owner))):
            _refuse_kueue(draft)
        is_never = _judge(draft, self._preemption_said(draft), [pod.gpus for pod in pods], is_complete=draft.is_whole)
        if not is_never and pods and all(self._is_made_again(pod) for pod in pods):
            draft.preempts = Preempts.EVICT

    def _above(self, owner: OwnerInfo) -> Iterator[OwnerInfo]:
        for _ in range(DEEPEST):
            found = None if owner.owner is None else self._owner(owner.owner.uid, owner.namespace)
            if found is None:
                return
            yield found
            owner = found

    def _preemption_said(self, draft: _Draft) -> set[str]:
        """Return what pods and owner say of preemption."""
        sources = [pod.annotations for pod in draft.pods]
        if draft.owner is not None:
            sources += [each.annotations for each in self._below(draft.owner)]
        return {said[names.PREEMPTION] for said in sources if names.PREEMPTION in said}

    def _is_made_again(self, pod: PodInfo) -> bool:
        """Whether an evicted pod is made again without being counted as failed."""
        if pod.owner is None:
            return False
        if is_known_kind(pod.owner):
            job = self._owner(pod.owner.uid, pod.namespace)
            return job is not None and job.ignores_disruption and job.uid not in self._gone
        is_wanted = pod.annotations.get(names.PREEMPTION) == "restart"
        return is_wanted and (group_of(pod.owner), pod.owner.kind) in REMAKERS


def _age(pod: PodInfo) -> tuple[float, str, str]:
    return pod.created, pod.name, pod.uid


def _fit(uid: str) -> str:
    return uid if _FIT.fullmatch(uid) else hashlib.sha256(uid.encode()).hexdigest()[:40]


# What is wrong with a gang


def _refuse_kueue(draft: _Draft) -> None:
    draft.refuse(
        f"Kueue decides when it runs ({KUEUE_LABELS[0]} or the like is set);"
        " remove that, or let another schedulerName place its pods"
    )


def _judge(draft: _Draft, preemption: Collection[str], gpus: Iterable[int], *, is_complete: bool) -> bool:
    """Judge what holds for all gangs; say whether its users want it never to be preempted.

    gpus          of its pods, and of those that will be made
    is_complete   there will be no others
    """
    wrong = sorted(set(preemption) - {"restart", "never"})
    if wrong:
        draft.refuse(f"{names.PREEMPTION} is {wrong[0][:40]!r}; expected restart or never")
    different = sorted({*gpus} - {0})
    if len(different) > 1:
        draft.refuse(
            f"its pods ask for different numbers of GPUs ({', '.join(map(str, different))});"
            " give all of them the same number, or none"
        )
    if any(label in pod.labels for pod in draft.pods for label in KUEUE_LABELS):
        _refuse_kueue(draft)
    if is_complete and not different:
        draft.refuse(
            "none of its pods asks for GPUs; Poise places pods with GPUs only, so set spec.schedulerName: default-scheduler"
        )
    return bool(wrong) or "never" in preemption


def _judge_plan(draft: _Draft, plan: Sequence[PodTemplate], scheduler: str) -> None:
    """Judge the replicated jobs of a JobSet: all pods of a gang have to exist at once."""
    ours = {each.name: each for each in plan if each.scheduler == scheduler}
    for each in plan:
        if each.scheduler != scheduler and each.gpus and ours:
            draft.refuse(
                f"the pods of its replicated job {each.name} have schedulerName {each.scheduler!r}, others {scheduler!r};"
                " give all its pods the same"
            )
    for each in ours.values():
        first = next((ours[name] for name in each.after if name in ours), None)
        if first is None or not each.gpus:
            continue
        remedy = "start them together" if first.gpus else f"set schedulerName: default-scheduler for {first.name}"
        draft.refuse(
            f"the pods of {each.name} are made after those of {first.name} have started, but a gang starts as one; {remedy}"
        )


def _judge_said_size(draft: _Draft) -> None:
    """Judge a size that is said although the owner has one."""
    said = {pod.annotations[names.GANG_SIZE] for pod in draft.pods if names.GANG_SIZE in pod.annotations}
    if draft.owner is not None and names.GANG_SIZE in draft.owner.annotations:
        said.add(draft.owner.annotations[names.GANG_SIZE])
    wrong = sorted(said - {str(draft.size)})
    if wrong:
        draft.refuse(
            f"{names.GANG_SIZE} is {wrong[0][:40]!r}, but it makes {draft.size} pods at once; remove the annotation"
        )


def _said_size(draft: _Draft) -> int | None:
    """Return the size that the pods say; None: none that makes sense, of which the draft is told."""
    said: dict[str, str] = {}
    for pod in draft.pods:
        for name in GROUP_SIZES:
            text = pod.annotations.get(name) or pod.labels.get(name)
            if text:
                said.setdefault(text, name)
                break
    if not said:
        if draft.pods:
            draft.refuse(f"it does not say how many pods it has; set the annotation {names.GANG_SIZE} on its pods")
        return None
    if len(said) > 1:
        values = ", ".join(repr(text[:40]) for text in sorted(said))
        draft.refuse(f"its pods differ in {names.GANG_SIZE} ({values}); give all of them the same number")
        return None
    ((text, name),) = said.items()
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        draft.refuse(f"{name} is {text[:40]!r}; expected a number of pods, such as 4")
        return None
    return int(text)
