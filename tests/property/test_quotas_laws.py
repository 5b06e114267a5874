"""What users have queued and sent: kept in step with the records, whatever happens, and the same after a restart."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from tests.machine import ALICE, BOB, Service, a_request

from poise.service.server.quotas import HOUR, SLOT, Allowance, Load, size_of
from poise.service.server.service_api import JobFilter, RequestRefusedError, Verb
from poise.service.wire.views import Account, Role

PEOPLE = (ALICE, BOB, Account(name="carol", tenant=ALICE.tenant, role=Role.USER))
BOUNDS = Allowance(user_jobs=6, tenant_jobs=8, user_rate=9, user_bytes=3_000, tenant_bytes=4_000)
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(1, 4), st.sampled_from([0, 100, 1_000])),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("cancel_all"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([1, 59, 61, 600, 1_800, 3_500, 4_000])),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("chapter"), st.sampled_from(["las", "fifo"])),
)


class QuotaModel:
    """A service, and what was taken from whom, kept the long way."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(folder, allowance=BOUNDS)
        self.sent: list[tuple[float, str, int]] = []
        self.live: dict[str, tuple[Account, int]] = {}

    def submit(self, who: int, jobs: int, filler: int) -> None:
        by, request = PEOPLE[who], a_request(hold=True, env={"F": "x" * filler})
        size = size_of(request.model_dump_json(exclude_defaults=True))
        fits = self._fits(by, jobs, jobs * size)
        try:
            ids = self.service.submit(*[request] * jobs, by=by)
        except RequestRefusedError:
            if fits:
                raise
            return
        assert fits
        self.sent += [(self.service.machine.now, by.name, size)] * jobs
        self.live |= dict.fromkeys(ids, (by, size))

    def _fits(self, by: Account, jobs: int, size: int) -> bool:
        mine = [each for owner, each in self.live.values() if owner == by]
        ours = [each for owner, each in self.live.values() if owner.tenant == by.tenant]
        slot = self.service.machine.now // SLOT
        lately = [each for at, name, each in self.sent if name == by.name and at // SLOT >= slot - HOUR // SLOT]
        return (
            len(mine) + jobs <= BOUNDS.user_jobs
            and len(ours) + jobs <= BOUNDS.tenant_jobs
            and len(lately) + jobs <= BOUNDS.user_rate
            and max(sum(mine), sum(lately)) + size <= BOUNDS.user_bytes
            and sum(ours) + size <= BOUNDS.tenant_bytes
        )

    def cancel(self, which: int) -> None:
        if self.live:
            job = list(self.live)[which % len(self.live)]
            self.service.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL))
            del self.live[job]

    def cancel_all(self, who: int) -> None:
        tenant = PEOPLE[who].tenant
        mine = [job for job, (by, _) in self.live.items() if by.tenant == tenant]
        assert self.service.call(lambda engine: engine.cancel_all(ALICE, JobFilter(tenant=tenant))).jobs == len(mine)
        for job in mine:
            del self.live[job]

    def wait(self, seconds: int) -> None:
        self.service.pass_time(seconds)

    def restart(self, _: int) -> None:
        self.service.restart()

    def chapter(self, policy: str) -> None:
        self.service.call(lambda engine: engine.set_policy(ALICE, policy))

    def check(self) -> None:
        usage = self.service.loop.state.usage
        tenants, users = Counter[str](), Counter[tuple[str, str]]()
        sizes: Counter[object] = Counter()
        for by, size in self.live.values():
            tenants[by.tenant] += 1
            users[by.tenant, by.name] += 1
            sizes[by.tenant] += size
            sizes[by.tenant, by.name] += size
        assert usage.tenants == {name: Load(jobs, sizes[name]) for name, jobs in tenants.items()}
        assert usage.users == {user: Load(jobs, sizes[user]) for user, jobs in users.items()}


@given(st.lists(STEPS, max_size=25))
def test_exactly_what_the_quotas_allow_is_accepted_also_after_restarts(steps: list[tuple[str, *tuple[int, ...]]]) -> None:
    with TemporaryDirectory() as folder:
        model = QuotaModel(Path(folder))
        try:
            for name, *given_ in steps:
                getattr(model, name)(*given_)
                model.check()
        finally:
            model.service.loop.store.close()
