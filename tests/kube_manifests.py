"""The manifests below deploy/kubernetes, as `kubectl apply -k` would send them."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kube.server import find_kubectl

KUBERNETES = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
BASE, SITE, ONLY_POISE_JOBS = "base", "overlays/site", "overlays/only-poise-jobs"
PATIENCE = 60.0

Json = dict[str, Any]


def rendered(folder: str | Path = BASE) -> list[Json]:
    """The documents to apply, in the order in which that works; the test is skipped where there is no kubectl.

    folder   below deploy/kubernetes, or any other that has a kustomization
    """
    return [each for each in yaml.safe_load_all(_text(KUBERNETES / folder)) if each]


@cache
def _text(folder: Path) -> str:
    kubectl = find_kubectl()
    if kubectl is None:
        pytest.skip("kubectl, which renders the manifests, is not installed")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
