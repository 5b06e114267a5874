"""Why gangs wait, said where their users look: as Events of a pod and of the owner, and as a condition of pods.

An API server is easily flooded with explanations: there are as many as gangs, and their numbers change with every
decision. So reasons are only noted (`ReasonWriter.note`), and written at a fixed rate; gangs of which
nothing was written yet come first. A gang's first pod and its owner speak for all of it.

Of the two places on a pod itself, an annotation and the condition `PodScheduled`, Poise writes the condition: schedulers
say it there, `kubectl describe pod` and dashboards show it, and it needs no right to change pods themselves. Cluster
autoscalers read it, too: for every pod of which it says `Unschedulable` they look for room. Hence only reasons that more
nodes would mend use that word, and then, once the reason has lasted, all pods of the gang say it: for the first alone
an autoscaler would buy one node, which a gang of several cannot use. Other reasons have other words, on the first pod.
"""

import asyncio
import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import heappop, heappush
from time import monotonic, time  # noqa: TID251 - events carry the time at which things happened
from typing import NamedTuple

from poise.service.backends.kubernetes.client import KubeClient, PatchKind
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError
from poise.service.backends.kubernetes.gangs import Gang
from poise.service.backends.kubernetes.objects import Json, PodInfo
from poise.service.backends.kubernetes.owners import OwnerPhase

LOG = logging.getLogger("poise.kubernetes")

COMPONENT = "poise"
UNSCHEDULABLE = "Unschedulable"
WAITS = "WaitsWithGang"  # what pods say that have said Unschedulable and do not any more
PROBLEMS = frozenset({"cannot-run", "rejected", "failed", "run-trouble"})  # codes that need a person to act
MENDED_BY_NODES = frozenset({"capacity", "unavailable", "rejected"})  # codes that more nodes would mend
WORDS = {
    "capacity": "WaitingForCapacity",
    "unavailable": "WaitingForNodes",
    "fragmentation": "WaitingForRoomTogether",
    "behind-others": "WaitingBehindOthers",
    "tenant-share": "WaitingForShare",
    "held-back": "HeldBack",
    "incomplete": "WaitingForPods",
}

LONGEST = 1024  # bytes of a message
REPEAT_SECONDS = 600.0  # between two repetitions of the same reason
FLICKER_SECONDS = 60.0  # between two versions of a reason that differ in numbers only
CHANGE_SECONDS = 10.0  # between two reasons of one gang, whatever they are
LASTING_SECONDS = 60.0  # for which more nodes would have helped before autoscalers are told
MOST_NOTICES = 1000  # Events on single pods that are kept while the server is away; the oldest go first
FORGET_SECONDS = 3600.0  # after which a gang is forgotten of which nothing more is said; the server forgets Events, too
AWAY_SECONDS = 5.0  # for which a server that is away is left alone
TICK = 0.25  # seconds between two looks at what there is to write
_NUMBER = re.compile(r"\d+([.,]\d+)*")


class _Subject(NamedTuple):
    """What an Event is about."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(eq=False, slots=True)
class _WrittenEvent:
    """An Event that was written. `count`: how often it happened, as it says itself."""

    name: str
    count: int


@dataclass(eq=False, slots=True)
class _GangReason:
    """What to say of a gang, and what was said last.

    noted      when it was last noted;  since: when its code became what it is
    said       code and text that were written last; None: nothing was;  said_at: when
    due        when to write it again; None: nothing new was noted since
    events     that were written, by uid of what they are about and by code
    marked     reason and message of the conditions that were written, by uid of the pod
    is_spread  all its pods are to say Unschedulable
    """

    gang: Gang
    job: str | None
    code: str
    text: str
    noted: float
    since: float
    said: tuple[str, str] | None = None
    said_at: float = 0.0
    due: float | None = None
    events: dict[tuple[str, str], _WrittenEvent] = field(default_factory=dict)
    marked: dict[str, tuple[str, str]] = field(default_factory=dict)
    is_spread: bool = False

    def first(self) -> PodInfo | None:
        """Return the pod that speaks for the gang."""
        return min(self.gang.pods, key=lambda pod: pod.name, default=None)

    def message(self) -> str:
        """Return the one sentence. Texts about a job leave out of what they speak."""
        return _cut(self.text if self.job is None else f"Poise's job {self.job} {self.text}")

    def condition_of(self, pod: PodInfo) -> tuple[str, str] | None:
        """Return reason and message of why a pod is not scheduled, as far as is known; None: none."""
        found = pod.condition("PodScheduled")
        return self.marked.get(pod.uid) or (None if found is None or found.is_true else (found.reason, found.message))

    def wanted_of(self, pod: PodInfo) -> tuple[str, str]:
        """Return reason and message that a pod is to have."""
        first = self.first()
        if first is None or first.uid == pod.uid:
            return (UNSCHEDULABLE if self.is_spread else reason_word(self.code)), self.message()
        # Without numbers: what differs from moment to moment is written on the first pod alone.
        text = _cut(f"waits with its gang, {self.gang.what}; pod {first.name} says why")
        return (UNSCHEDULABLE if self.is_spread else WAITS), text


class ReasonWriter:
    """Writes reasons into Kubernetes, while this service leads. All of it belongs to one event loop.

    calls     requests so far;  written: those that changed something;  refused: those that the server refused, by status
    """

    def __init__(
        self,
        client: KubeClient,
        instance: str,
        *,
        per_second: float = 20.0,
        burst: int = 100,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time,
        is_leading: Callable[[], bool],
    ) -> None:
        self._client, self._instance = client, instance[:128]
        self._per_second, self._burst, self._clock, self._wall = per_second, burst, clock, wall
        self._is_leading = is_leading
        now = clock()
        self._tokens, self._filled = float(burst), now
        self._away_until, self._sweep_at = now, now + FORGET_SECONDS
        self._entries: dict[str, _GangReason] = {}
        self._fresh: dict[str, None] = {}  # of whom nothing was said yet, in order
        self._later: list[tuple[float, str]] = []  # by time; those whose entry has another `due` by now are skipped
        self._marks: dict[str, dict[str, None]] = {}  # uids of pods whose condition has to be written, by gang
        self._logged: set[tuple[int, str]] = set()
        self._notices: deque[tuple[PodInfo, str, str]] = deque(maxlen=MOST_NOTICES)
        self.calls = 0
        self.written = 0
        self.refused: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, gang: Gang, job: str | None, code: str, text: str) -> None:
        """Remember why a gang waits. What is noted again is said again, but no more often than people need."""
        now = self._clock()
        entry = self._entries.get(gang.key)
        if entry is None:
            self._entries[gang.key] = _GangReason(gang, job, code, text, noted=now, since=now)
            self._fresh[gang.key] = None
            return
        if entry.code != code:
            entry.since = now
        entry.gang, entry.job, entry.code, entry.text, entry.noted = gang, job, code, text, now
        if entry.said is None:
            return
        self._schedule(entry)
        is_lasting = code in MENDED_BY_NODES and (entry.is_spread or now - entry.since >= LASTING_SECONDS)
        if is_lasting != entry.is_spread:
            entry.is_spread = is_lasting
            self._queue_marks(entry)

    def forget(self, key: str) -> None:
        """Say nothing more of a gang: it runs, or is gone."""
        self._entries.pop(key, None)
        self._fresh.pop(key, None)
        self._marks.pop(key, None)

    def retain(self, keys: Collection[str]) -> None:
        """Say nothing more of all gangs but these."""
        for key in [key for key in self._entries if key not in keys]:
            self.forget(key)

    def tell_once(self, pods: Iterable[PodInfo], code: str, text: str) -> None:
        """Have an Event written on pods that Poise has created, and that may be deleted soon: before what waits."""
        for pod in pods:
            self._notices.append((pod, code, _cut(text)))

    async def run(self) -> None:
        """Write for ever what was noted."""
        while True:
            await self.publish()
            await asyncio.sleep(TICK)

    async def publish(self) -> None:
        """Write what is due, as far as the rate allows: what was never said, what has changed, conditions of other pods."""
        try:
            while self._may_write():
                if self._notices:
                    await self._notify()
                    continue
                key = self._next()
                if key is not None:
                    await self._say(key, self._entries[key])
                elif self._marks:
                    await self._mark()
                else:
                    break
        except ApiUnavailableError as error:
            self._away_until = self._clock() + max(AWAY_SECONDS, error.retry_after or 0.0)
        self._sweep()

    # What comes next

    def _may_write(self) -> bool:
        now = self._clock()
        self._tokens = min(float(self._burst), self._tokens + (now - self._filled) * self._per_second)
        self._filled = now
        return self._tokens >= 1.0 and now >= self._away_until and self._is_leading()

    def _next(self) -> str | None:
        """Return the gang to write of next."""
        if self._fresh:
            key = next(iter(self._fresh))
            del self._fresh[key]
            return key
        while self._later and self._later[0][0] <= self._clock():
            due, key = heappop(self._later)
            entry = self._entries.get(key)
            if entry is not None and entry.due == due:
                entry.due = None
                return key
        return None

    def _schedule(self, entry: _GangReason) -> None:
        assert entry.said is not None
        due = entry.said_at + _pause(entry.said, (entry.code, entry.text))
        if entry.due != due:
            entry.due = due
            heappush(self._later, (due, entry.gang.key))

    def _queue_marks(self, entry: _GangReason) -> None:
        """Have the conditions written that tell autoscalers the wrong thing."""
        for pod in entry.gang.pods:
            known = entry.condition_of(pod)
            is_told = known is not None and known[0] == UNSCHEDULABLE
            # What an earlier leader has told them holds until it is known whether the reason lasts.
            is_wrong = not is_told if entry.is_spread else is_told and entry.code not in MENDED_BY_NODES
            if is_wrong and pod.gpus and not pod.node:
                self._marks.setdefault(entry.gang.key, {})[pod.uid] = None

    def _sweep(self) -> None:
        """Forget gangs without a note for long: a safeguard, as `forget` is called when they go."""
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep_at = now + FORGET_SECONDS
            for key in [key for key, entry in self._entries.items() if entry.noted <= now - FORGET_SECONDS]:
                self.forget(key)

    # Writing

    async def _say(self, key: str, entry: _GangReason) -> None:
        """Write the Events of a gang and the condition of its first pod."""
        said, first = (entry.code, entry.text), entry.first()
        try:
            for subject in _subjects(entry.gang, first):
                await self._tell(entry, subject)
            if first is not None:
                await self._set_condition(entry, first)
        except ApiUnavailableError:
            if self._entries.get(key) is entry:
                entry.due = self._clock()
                heappush(self._later, (entry.due, key))
            raise
        entry.said, entry.said_at = said, self._clock()
        current = {pod.uid for pod in entry.gang.pods} | ({entry.gang.owner.uid} if entry.gang.owner else set())
        entry.events = {about: told for about, told in entry.events.items() if about[0] in current}
        entry.marked = {uid: told for uid, told in entry.marked.items() if uid in current}
        if self._entries.get(key) is entry:
            self._queue_marks(entry)
            if (entry.code, entry.text) != said:
                self._schedule(entry)  # it was noted while this was written

    async def _tell(self, entry: _GangReason, subject: _Subject) -> None:
        """Write an Event, or that it has happened again. Its name is made of what it says, so a restart finds it again."""
        # Core Events, not those of events.k8s.io: `kubectl describe` shows both, but of the latter the message and the
        # count cannot be changed.
        base = f"/api/v1/namespaces/{entry.gang.namespace}/events"
        about = subject.uid, entry.code
        told = entry.events.get(about)
        changes: Json = {"lastTimestamp": self._now(), "message": entry.message(), "reportingInstance": self._instance}
        if told is not None:
            answer = await self._call(
                "patch events", self._client.patch(f"{base}/{told.name}", changes | {"count": told.count + 1}), {404}
            )
            if answer is not None:
                told.count += 1
                return
        name = _event_name(subject, entry.code)
        answer = await self._call(
            "create events",
            self._client.post(base, self._event(entry.gang.namespace, entry.code, subject, name, changes)),
            {409},
        )
        if answer is None and told is None:
            # Of an earlier leader. How often it happened is in the answer only, so it is counted from the next time on.
            answer = await self._call("patch events", self._client.patch(f"{base}/{name}", changes), {404})
        if answer is not None:
            entry.events[about] = _WrittenEvent(name, int(answer.get("count") or 1))

    async def _notify(self) -> None:
        """Write the oldest of the Events on single pods; if the server is away it stays the oldest."""
        pod, code, text = self._notices[0]
        subject = _Subject("v1", "Pod", pod.name, pod.uid)
        changes: Json = {"lastTimestamp": self._now(), "message": text, "reportingInstance": self._instance}
        event = self._event(pod.namespace, code, subject, _event_name(subject, code), changes)
        await self._call("create events", self._client.post(f"/api/v1/namespaces/{pod.namespace}/events", event), {409})
        self._notices.popleft()

    def _event(self, namespace: str, code: str, subject: _Subject, name: str, changes: Json) -> Json:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": subject.api_version,
                "kind": subject.kind,
                "name": subject.name,
                "namespace": namespace,
                "uid": subject.uid,
            },
            "type": "Warning" if code in PROBLEMS else "Normal",
            "reason": reason_word(code),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "firstTimestamp": changes["lastTimestamp"],
            "count": 1,
            **changes,
        }

    async def _mark(self) -> None:
        """Write the condition of one pod that is not the first of its gang, or is and has to say another word."""
        key = next(iter(self._marks))
        uid = next(iter(self._marks[key]))
        entry = self._entries[key]
        pod = next((each for each in entry.gang.pods if each.uid == uid), None)
        if pod is not None:
            await self._set_condition(entry, pod)
        if (left := self._marks.get(key)) is not None:
            left.pop(uid, None)
            if not left:
                del self._marks[key]

    async def _set_condition(self, entry: _GangReason, pod: PodInfo) -> None:
        wanted, known = entry.wanted_of(pod), entry.condition_of(pod)
        if pod.node or wanted == known:
            return
        condition: Json = {"type": "PodScheduled", "status": "False", "reason": wanted[0], "message": wanted[1]}
        if known is None:
            condition["lastTransitionTime"] = self._now()
        # With its version: a pod that was bound meanwhile must not be told that it is not.
        body: Json = {"metadata": {"uid": pod.uid, "resourceVersion": pod.version}, "status": {"conditions": [condition]}}
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        if await self._call("patch pods/status", self._client.patch(path, body, PatchKind.STRATEGIC), {409}) is not None:
            entry.marked[pod.uid] = wanted

    async def _call(self, what: str, request: Coroutine[None, None, Json], expected: Collection[int]) -> Json | None:
        """Send a request; None: the server refused it, which is never worse than a reason that is not told."""
        if not self._is_leading():
            request.close()
            raise ApiUnavailableError("this service does not lead any more")
        self._tokens -= 1.0
        self.calls += 1
        try:
            answer = await request
        except ApiError as error:
            self.refused[error.status] += 1
            if error.status not in expected and (error.status, what) not in self._logged:
                self._logged.add((error.status, what))
                LOG.warning("reasons cannot be told in full: %s: %s", what, error)
            return None
        self.written += 1
        return answer

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def reason_word(code: str) -> str:
    """Return the word that Kubernetes shows for one of our codes."""
    return WORDS.get(code) or "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", code)) or "Waiting"


def _subjects(gang: Gang, first: PodInfo | None) -> Iterator[_Subject]:
    if first is not None:
        yield _Subject("v1", "Pod", first.name, first.uid)
    owner = gang.owner
    if owner is not None and owner.state is not OwnerPhase.GONE:
        version = owner.path.removeprefix("/apis/").partition("/namespaces/")[0]
        yield _Subject(version, owner.kind, owner.name, owner.uid)


def _event_name(subject: _Subject, code: str) -> str:
    digest = hashlib.sha256(f"{subject.uid}\0{code}".encode()).hexdigest()[:16]
    return f"{subject.name[:200].rstrip('.-')}.{digest}"


def _pause(said: tuple[str, str], new: tuple[str, str]) -> float:
    """Return how long after the last time a reason may be told."""
    if said == new:
        return REPEAT_SECONDS
    is_flicker = said[0] == new[0] and _NUMBER.sub("#", said[1]) == _NUMBER.sub("#", new[1])
    return FLICKER_SECONDS if is_flicker else CHANGE_SECONDS


def _cut(text: str) -> str:
    """Return what fits into a message."""
    data = text.encode()
    return text if len(data) <= LONGEST else data[: LONGEST - 3].decode(errors="ignore") + "…"
