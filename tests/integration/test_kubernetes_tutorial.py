"""The tutorial, on a real API server: from the manifests to a job that is preempted and goes on, and to nothing left.

Poise's server runs in its pod, as a process of this machine (tests/kube_install.py); so do the pods of jobs. Of kubectl,
`exec` and `port-forward` are played, as there is no kubelet that could serve them (tests/kube/kubectl.py).
"""

from pathlib import Path

import pytest
from tests.docs_runner import ROOT
from tests.kube.controllers import Controllers
from tests.kube.kubelet import cannot_run
from tests.kube.server import KubeServer, find_kubectl
from tests.kube_install import JOBS, SYSTEM, Installation
from tests.kube_page import play

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.slow,
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(find_kubectl() is None, reason="kubectl, which applies the manifests, is not installed"),
    pytest.mark.skipif(bool(cannot_run()), reason=cannot_run()),
]

PAGE = ROOT / "docs" / "tutorial" / "first-job-on-kubernetes.md"


def test_the_tutorial_is_true(fresh_kube: KubeServer, tmp_path: Path) -> None:
    fresh_kube.add_node("n1", 2)
    folder = tmp_path / "page"
    folder.mkdir()
    with Installation(fresh_kube, tmp_path, images=("python:3.12",)) as installation, Controllers(fresh_kube):
        for played in play(PAGE, folder, installation):
            shown, got = "\n".join(played.step.shown), "\n".join(played.got)
            assert played.fits, f"$ {played.step.command}\nshown:\n{shown}\nprinted:\n{got}\n{installation.log()[-2000:]}"
        left = {each["metadata"]["name"] for each in fresh_kube.admin.list("/api/v1/namespaces")}
        assert not left & {SYSTEM, JOBS}
        roles = fresh_kube.admin.list("/apis/rbac.authorization.k8s.io/v1/clusterroles")
        assert not [each for each in roles if each["metadata"]["name"].startswith("poise")]
