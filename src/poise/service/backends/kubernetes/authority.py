"""Which pod speaks: the API server knows whose token it is, so that Poise needs no secret of its own in users' pods.

The token of a pod is made by its kubelet for the audience `poise`, is bound to the pod, and dies with it. The API server
itself does not accept it.
"""

import asyncio
import hashlib
from collections.abc import Callable
from time import monotonic

from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError
from poise.service.backends.kubernetes.manifests import AUDIENCE
from poise.service.backends.kubernetes.objects import PodInfo
from poise.service.backends.kubernetes.view import ClusterView
from poise.service.backends.remote.authority import AuthorityAwayError

KNOWN_SECONDS = 60.0  # for which an answer of the API server counts
ANSWER_SECONDS = 1.0  # for which a request of an agent waits for it: less than the agent waits for its own answer
MOST_KNOWN = 50_000
MOST_REVIEWS = 5_000  # under way at a time; strangers can ask for them, too
POD_NAME, POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"
ACCOUNT = "system:serviceaccount:"


class PodAuthority:
    """Says which pod a token belongs to. A pod may speak for itself alone.

    is_unknown   whether the journal never had the job of a pod. Its agent gets no answer then: told that its run is unknown,
                 it would end it
    """

    def __init__(self, client: KubeClient, view: ClusterView, namespace: str, is_unknown: Callable[[PodInfo], bool]) -> None:
        self._client, self._view, self._namespace, self._is_unknown = client, view, namespace, is_unknown
        self._known: dict[str, tuple[float, str, str]] = {}  # by hash of the token: until when, pod, uid
        # One review per token at a time. It goes on when the request that began it was answered: the next has the result.
        self._reviews: dict[str, asyncio.Task[tuple[str, str] | None]] = {}  # by hash of the token

    async def node_of(self, token: str) -> str | None:
        """Return the name of the pod; None: it is none of ours. Raise AuthorityAwayError while that cannot be found out."""
        mark = hashlib.sha256(token.encode()).hexdigest()
        found = self._known.get(mark)
        if found is None or found[0] < monotonic():
            reviewed = await self._reviewed(token, mark)
            if reviewed is None:
                return None
            name, uid = reviewed
        else:
            _, name, uid = found
        pod = self._view.pods.get((self._namespace, name))
        if pod is None:  # it may be newer than what is known of the cluster
            raise AuthorityAwayError(f"pod {name} is not known yet")
        if self._is_unknown(pod):
            raise AuthorityAwayError(f"pod {name} is of a job that the journal never had")
        return name if pod.uid == uid else None

    async def _reviewed(self, token: str, mark: str) -> tuple[str, str] | None:
        """Return pod and uid; None: it is none of ours. Raise AuthorityAwayError if that takes too long."""
        review = self._reviews.get(mark)
        if review is None:
            if len(self._reviews) >= MOST_REVIEWS:
                raise AuthorityAwayError("too many tokens wait for a review")
            review = self._reviews[mark] = asyncio.get_running_loop().create_task(self._review(token, mark))
            review.add_done_callback(lambda done: done.cancelled() or done.exception())  # which may have no reader left
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.shield(review)
        except TimeoutError:
            raise AuthorityAwayError(f"the API server has not said for {ANSWER_SECONDS:g} s whose token it is") from None

    async def close(self) -> None:
        """Give up the reviews that are under way."""
        for review in [*self._reviews.values()]:
            review.cancel()
        await asyncio.gather(*self._reviews.values(), return_exceptions=True)

    async def _review(self, token: str, mark: str) -> tuple[str, str] | None:
        try:
            reviewed = await self._ask(token)
        finally:
            del self._reviews[mark]
        if reviewed is not None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[mark] = (monotonic() + KNOWN_SECONDS, *reviewed)
        return reviewed

    async def _ask(self, token: str) -> tuple[str, str] | None:
        body = {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }  # fmt: skip
        try:
            answer = await self._client.post("/apis/authentication.k8s.io/v1/tokenreviews", body)
        except (ApiError, ApiUnavailableError) as error:
            raise AuthorityAwayError(f"the API server does not say whose token it is: {error}") from None
        status = answer.get("status") or {}
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        names, uids = extra.get(POD_NAME) or (), extra.get(POD_UID) or ()
        is_ours = str(user.get("username", "")).startswith(f"{ACCOUNT}{self._namespace}:")
        if not status.get("authenticated") or AUDIENCE not in (status.get("audiences") or ()) or not is_ours:
            return None
        return (names[0], uids[0]) if names and uids else None
