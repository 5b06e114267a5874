"""What the account that Poise uses has to be allowed, and whether it is.

The manifests in `deploy/kubernetes` grant these rights and no others; tests compare them, and what is used of them.
"""

from collections.abc import Iterable, Sequence

from poise.scheduler.model.errors import RequestError
from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import ApiError
from poise.service.backends.kubernetes.objects import Json

Right = tuple[str, str, str, str | None]
"""Verb, group, resource with subresource or name, and `jobs` if it is needed in the namespace of jobs alone."""

LEASE_NAME = "poise"
OPTIONAL = (
    ("/apis/jobset.x-k8s.io/v1alpha2/jobsets", "JobSet"),
    ("/apis/trainer.kubeflow.org/v1alpha1/trainjobs", "TrainJob"),
)
"""Kinds that a cluster has only if they were installed."""

RIGHTS: Sequence[Right] = (
    ("list", "", "nodes", None), ("watch", "", "nodes", None), ("list", "", "pods", None), ("watch", "", "pods", None),
    ("create", "", "pods", "jobs"), ("get", "", "pods", "jobs"), ("delete", "", "pods", "jobs"),
    ("create", "", "services", "jobs"), ("get", "", "services", "jobs"), ("delete", "", "services", "jobs"),
    ("create", "", "events", "jobs"),
    ("create", "coordination.k8s.io", "leases", "jobs"), ("get", "coordination.k8s.io", f"leases {LEASE_NAME}", "jobs"),
    ("update", "coordination.k8s.io", f"leases {LEASE_NAME}", "jobs"),
    ("create", "authentication.k8s.io", "tokenreviews", None),
)  # fmt: skip
"""What it cannot do without."""
GANG_RIGHTS: Sequence[Right] = (
    ("list", "", "namespaces", None), ("watch", "", "namespaces", None),
    ("create", "", "pods/binding", None), ("create", "", "pods/eviction", None), ("patch", "", "pods/status", None),
    ("list", "policy", "poddisruptionbudgets", None),
    ("create", "", "events", None), ("patch", "", "events", None),
    ("list", "batch", "jobs", None), ("watch", "batch", "jobs", None), ("patch", "batch", "jobs", None),
)  # fmt: skip
"""What it needs to place pods that others create."""


def rights_on(path: str) -> list[Right]:
    """Return the rights that it needs on owners of an optional kind."""
    group, plural = path.split("/")[2], path.rpartition("/")[2]
    return [(verb, group, plural, None) for verb in ("list", "watch", "patch")]


async def check_rights(client: KubeClient, namespace: str, rights: Iterable[Right], purpose: str = "") -> None:
    """Raise RequestError, a sentence, for the first right that is missing."""
    for verb, group, resource, scope in rights:
        kind, _, name = resource.partition(" ")
        plural, _, sub = kind.partition("/")
        asked: Json = {"verb": verb, "group": group, "resource": plural, "subresource": sub, "name": name}
        if scope is not None:
            asked["namespace"] = namespace
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = await client.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        if not (answer.get("status") or {}).get("allowed"):
            where = "" if scope is None else f" in namespace {namespace}"
            raise RequestError(
                f"the account that Poise uses may not {verb} {resource}{where}; Poise needs this right{purpose}:"
                " apply deploy/kubernetes, or name another account with --kubeconfig and --context"
            )


async def is_defined(client: KubeClient, path: str) -> bool:
    """Whether the cluster has a kind. Its objects are not asked for, as this account may have no right to them."""
    version, _, plural = path.rpartition("/")
    try:
        found = await client.get(version)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return any(each.get("name") == plural for each in found.get("resources") or ())
