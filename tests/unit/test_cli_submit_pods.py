"""What `poise submit` and job files say of pods: what Kubernetes would refuse later is refused here, by one sentence."""

from typing import Any

import pytest
from pydantic import ValidationError
from tests.shell import poise

from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import RunOrder, RunPart
from poise.service.backends.kubernetes.manifests import JOB_CONTAINER, PodTerms, run_pods
from poise.service.wire.jobfile import read_job_file
from poise.service.wire.request import OWN_FOLDERS, JobRequest, first_problem

NAME = "expected a name of Kubernetes: small letters, digits, `-` and `.`"
OWN = "and what is below it is Poise's own; name another folder"


def submit(*options: str) -> Any:
    return poise("submit", "--dry-run", "--json", "--no-venv", *options, "--", "fit")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--memory", "64"), "--memory: 64 is 64 bytes; expected at least 1MiB, such as 64GiB"),
        (("--memory", "64G"), "--memory: expected a size such as 8GB or 512MiB, got '64G'"),
        (("--cpu", "-1"), "--cpu: expected at least 0.001, got -1.0"),
        (("--cpu", "0.0001"), "--cpu: expected at least 0.001, got 0.0001"),
        (("--run-as", "-1"), "--run-as: expected at least 0, got -1"),
        (("--service-account", "A_B"), f"--service-account: {NAME}, got 'A_B'"),
        (("--pull-secret", "A_B"), f"--pull-secret: {NAME}, got 'A_B'"),
        (("--volume", "foo:bar:/x"), "--volume: 'foo' is no kind of volume; expected claim, secret or config"),
        (("--volume", "a:/"), "--volume: '/': a volume would hide the whole image there; name a folder below"),
        (("--volume", "a:/poise/"), f"--volume: '/poise/': /poise {OWN}"),
        (("--volume", "a://poise/lib"), f"--volume: '//poise/lib': /poise {OWN}"),
        (("--volume", "a:/dev/./shm"), f"--volume: '/dev/./shm': /dev/shm {OWN}"),
        (("--volume", "a:/x/../y"), "--volume: '/x/../y': `..` cannot be part of the path of a volume"),
        (("--volume", "a:/x", "--volume", "b:/x/"), "--volume: '/x/': two volumes cannot be mounted at one path"),
        (("--image", "http://x/y"), "--image: 'http://x/y': a scheme is no part of the name of an image; leave http:// out"),
        (
            ("--image", "UPPER/x"),
            "--image: 'UPPER/x': the names of repositories are in lower case; only a tag may have capitals",
        ),
    ],
)
def test_what_a_pod_cannot_have_is_refused_by_the_name_of_the_option(options: tuple[str, ...], text: str) -> None:
    assert submit(*options).refusal == text


@pytest.mark.parametrize(("text", "size"), [("1024Ki", 1 << 20), ("2Mi", 1 << 21), ("64Gi", 1 << 36), ("1Ti", 1 << 40)])
def test_memory_may_be_written_as_kubernetes_writes_it(text: str, size: int) -> None:
    assert submit("--memory", text).json["pod"] == {"memory": size}
    assert read_job_file(f"run: fit\nlimits: {{memory: {text}}}")[0].limits.memory == size


@pytest.mark.parametrize(
    "image", ["pytorch/pytorch:2.9.0-Cuda", "Host.io:5000/a/b:Tag", "localhost/a", "x@sha256:0a", "poise"]
)
def test_an_image_may_have_a_host_a_tag_and_a_digest(image: str) -> None:
    assert submit("--image", image).json["image"] == image


def test_volumes_of_different_paths_and_the_least_processor_are_taken() -> None:
    said = submit("--volume", "a:/x", "--volume", "secret:a:/x/y:ro", "--volume", "b:/poised", "--cpu", "0.001").json["pod"]
    assert ([each["path"] for each in said["volumes"]], said["cpu"]) == (["/x", "/x/y", "/poised"], 0.001)


@pytest.mark.parametrize(
    ("pod", "text"),
    [
        ("{memory: 64}", "job:2: pod.memory: 64 is 64 bytes; expected at least 1MiB, such as 64GiB"),
        ("{cpu: 0.0001}", "job:2: pod.cpu: expected at least 0.001, got 0.0001"),
        ("{volumes: 'a:/poise'}", f"job:2: pod.volumes: '/poise': /poise {OWN}"),
        ("{volumes: ['a:/x', 'b:/x']}", "job:2: pod.volumes: '/x': two volumes cannot be mounted at one path"),
        ("{volumes: ['pvc:a:/x']}", "job:2: pod.volumes: 'pvc' is no kind of volume; expected claim, secret or config"),
    ],
)
def test_a_job_file_is_held_to_the_same_rules(pod: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_job_file(f"run: fit\npod: {pod}")
    assert str(caught.value) == text


def test_the_server_holds_requests_to_the_same_rules() -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate({"command": ["x"], "pod": {"volumes": [{"name": "a", "path": "/dev/shm"}]}})
    assert first_problem(caught.value) == ("pod.volumes", f"'/dev/shm': /dev/shm {OWN}")


def test_every_folder_that_poise_mounts_in_the_container_of_a_job_is_refused_to_volumes() -> None:
    order = RunOrder("1", 1, (RunPart("v100-0", "v100", (0,)),), JobRequest(command=("x",), image="x"))
    _, [pod] = run_pods(order, PodTerms("jobs", "service", "http://server:1", "poise"), 1)
    [job] = [each for each in pod["spec"]["containers"] if each["name"] == JOB_CONTAINER]
    assert {each["mountPath"] for each in job["volumeMounts"]} == {*OWN_FOLDERS}
