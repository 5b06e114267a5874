"""What is applied to a cluster: least rights, names that agree, a server that is not root and cannot write its image."""

import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.kube_manifests import BASE, KUBERNETES, ONLY_POISE_JOBS, SITE, Json, rendered
from tests.shell import program_context

from poise import __version__
from poise.cli.serve import serve
from poise.service.backends.kubernetes import manifests, names
from poise.service.backends.kubernetes.rights import GANG_RIGHTS, LEASE_NAME, OPTIONAL, RIGHTS

ROOT = KUBERNETES.parents[1]
SYSTEM, JOBS, EVERYWHERE = "poise-system", "poise-jobs", "*"

ALWAYS = {
    ("list", "", "nodes", EVERYWHERE),
    ("watch", "", "nodes", EVERYWHERE),
    ("list", "", "pods", EVERYWHERE),
    ("watch", "", "pods", EVERYWHERE),
    ("create", "authentication.k8s.io", "tokenreviews", EVERYWHERE),
    ("create", "coordination.k8s.io", "leases", JOBS),
    ("get", "coordination.k8s.io", "leases poise", JOBS),
    ("update", "coordination.k8s.io", "leases poise", JOBS),
    ("create", "", "pods", JOBS),
    ("get", "", "pods", JOBS),
    ("delete", "", "pods", JOBS),
    ("create", "", "services", JOBS),
    ("get", "", "services", JOBS),
    ("delete", "", "services", JOBS),
    ("create", "", "events", JOBS),
}
"""Every right that Poise uses to run its own jobs: verb, group, resource (an object's name behind it), namespace."""

FOR_GANGS = {
    ("list", "", "namespaces", EVERYWHERE),
    ("watch", "", "namespaces", EVERYWHERE),
    ("create", "", "pods/binding", EVERYWHERE),
    ("patch", "", "pods/status", EVERYWHERE),
    ("create", "", "pods/eviction", EVERYWHERE),
    ("list", "policy", "poddisruptionbudgets", EVERYWHERE),
    ("create", "", "events", EVERYWHERE),
    ("patch", "", "events", EVERYWHERE),
    ("list", "batch", "jobs", EVERYWHERE),
    ("watch", "batch", "jobs", EVERYWHERE),
    ("patch", "batch", "jobs", EVERYWHERE),
    ("list", "jobset.x-k8s.io", "jobsets", EVERYWHERE),
    ("watch", "jobset.x-k8s.io", "jobsets", EVERYWHERE),
    ("patch", "jobset.x-k8s.io", "jobsets", EVERYWHERE),
    ("list", "trainer.kubeflow.org", "trainjobs", EVERYWHERE),
    ("watch", "trainer.kubeflow.org", "trainjobs", EVERYWHERE),
    ("patch", "trainer.kubeflow.org", "trainjobs", EVERYWHERE),
}
"""Those that it needs besides to schedule pods of others."""

EVERY_FOLDER = pytest.mark.parametrize("folder", [BASE, ONLY_POISE_JOBS, SITE])


def of_kind(documents: list[Json], *kinds: str) -> list[Json]:
    return [each for each in documents if each["kind"] in kinds]


def the(documents: list[Json], kind: str, name: str = "poise") -> Json:
    (found,) = (each for each in of_kind(documents, kind) if each["metadata"]["name"] == name)
    return found


def server_of(documents: list[Json]) -> Json:
    (container,) = the(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def granted(documents: list[Json]) -> Iterator[tuple[str, str, str, str]]:
    """Every right that the server's account is bound to."""
    for binding in of_kind(documents, "ClusterRoleBinding", "RoleBinding"):
        reference = binding["roleRef"]
        space = binding["metadata"].get("namespace", EVERYWHERE)
        (role,) = (
            each
            for each in of_kind(documents, reference["kind"])
            if each["metadata"]["name"] == reference["name"] and each["metadata"].get("namespace", EVERYWHERE) == space
        )
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "poise", "namespace": SYSTEM}]
        for rule in role["rules"]:
            for resource in rule["resources"]:
                objects = [f"{resource} {name}" for name in rule.get("resourceNames", ())] or [resource]
                yield from (
                    (verb, group, each, space) for verb in rule["verbs"] for group in rule["apiGroups"] for each in objects
                )


def test_the_rights_are_those_of_the_table_and_no_others() -> None:
    assert sorted(granted(rendered())) == sorted(ALWAYS | FOR_GANGS)


def test_without_pods_of_others_there_are_fewer_rights_and_the_server_knows() -> None:
    documents = rendered(ONLY_POISE_JOBS)
    assert sorted(granted(documents)) == sorted(ALWAYS)
    assert options_of(documents)["gangs"] is False
    assert options_of(rendered())["gangs"] is True


@EVERY_FOLDER
def test_no_right_is_a_wildcard_or_leads_to_others(folder: str) -> None:
    for role in of_kind(rendered(folder), "ClusterRole", "Role"):
        assert "aggregationRule" not in role
        for rule in role["rules"]:
            assert rule.keys() <= {"apiGroups", "resources", "resourceNames", "verbs"}
            words = {*rule["verbs"], *rule["resources"], *rule["apiGroups"]}
            assert not {each for each in words if "*" in each}
            assert not words & {"escalate", "bind", "impersonate", "deletecollection", "secrets", "serviceaccounts/token"}
            assert not words & {"pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "nodes/proxy"}


def test_every_role_is_bound_once() -> None:
    documents = rendered()
    bound = [each["roleRef"]["name"] for each in of_kind(documents, "ClusterRoleBinding", "RoleBinding")]
    assert sorted(bound) == sorted(each["metadata"]["name"] for each in of_kind(documents, "ClusterRole", "Role"))


def test_every_rule_says_what_it_is_for() -> None:
    """In the file that is read before it is applied: a comment before each rule, or before its role."""
    text = (KUBERNETES / BASE / "rights.yaml").read_text(encoding="utf-8")
    for role in re.split(r"^---\n", text, flags=re.MULTILINE):
        if "kind: ClusterRole\n" in role.partition("metadata:")[0] or "kind: Role\n" in role.partition("metadata:")[0]:
            assert "#" in role.partition("apiVersion:")[0]


def test_what_the_server_checks_at_its_start_is_granted() -> None:
    scopes = {None: EVERYWHERE, "jobs": JOBS}
    assert {(verb, group, resource, scopes[scope]) for verb, group, resource, scope in RIGHTS} == ALWAYS
    asked = {(verb, group, resource, scopes[scope]) for verb, group, resource, scope in GANG_RIGHTS}
    optional = {path.split("/")[2] for path, _ in OPTIONAL}
    assert asked == {each for each in FOR_GANGS if each[1] not in optional}


def test_names_are_those_of_the_code() -> None:
    documents = rendered()
    assert f"leases {LEASE_NAME}" in {resource for _, _, resource, _ in ALWAYS}
    (job,) = (each for each in of_kind(documents, "ServiceAccount") if each["metadata"]["namespace"] == JOBS)
    assert job["metadata"]["name"] == manifests.NO_RIGHTS
    policy = the(documents, "NetworkPolicy", "poise-ranks")
    assert policy["spec"]["podSelector"]["matchLabels"] == {names.MANAGED_BY: names.MANAGER}
    options = options_of(documents)
    assert options["scheduler_name"] == names.SCHEDULER
    assert options["gpu_resource"] == names.GPU_RESOURCE
    assert options["namespace"] == JOBS


def test_accounts_have_no_token_unless_a_pod_asks_for_it() -> None:
    accounts = of_kind(rendered(), "ServiceAccount")
    assert {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in accounts} == {
        (SYSTEM, "poise"),
        (JOBS, "poise-job"),
    }
    assert all(each["automountServiceAccountToken"] is False for each in accounts)
    assert the(rendered(), "StatefulSet")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True


@EVERY_FOLDER
def test_everything_is_in_a_namespace_that_there_is(folder: str) -> None:
    documents = rendered(folder)
    spaces = {each["metadata"]["name"] for each in of_kind(documents, "Namespace")}
    assert spaces == {SYSTEM, JOBS}
    for each in documents:
        has_none = each["kind"] in ("Namespace", "ClusterRole", "ClusterRoleBinding")
        assert each["metadata"].get("namespace") in ({None} if has_none else spaces), each["metadata"]["name"]
    assert documents[0]["kind"] == "Namespace"  # before all that is in it
    labels = {each["metadata"]["name"]: each["metadata"]["labels"] for each in of_kind(documents, "Namespace")}
    assert labels[SYSTEM]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert labels[JOBS]["pod-security.kubernetes.io/enforce"] == "baseline"


@EVERY_FOLDER
def test_no_two_documents_have_one_name(folder: str) -> None:
    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in rendered(folder)]
    assert len(keys) == len(set(keys))


@EVERY_FOLDER
def test_there_is_one_server_with_a_volume_of_its_own(folder: str) -> None:
    spec = the(rendered(folder), "StatefulSet")["spec"]
    assert spec["replicas"] == 1
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    assert of_kind(rendered(folder), "PodDisruptionBudget") == []


@EVERY_FOLDER
def test_the_server_runs_as_nobody_and_cannot_write_its_root(folder: str) -> None:
    pod = the(rendered(folder), "StatefulSet")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # Otherwise the kubelet would let a group write the state at each start, and the server refuses such a state.
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["resources"]["limits"].keys() == {"memory"}
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts == {"state": "/var/lib/poise", "tmp": "/tmp"}
    assert "hostPath" not in yaml.safe_dump(pod)


def test_the_server_is_started_watched_and_ended_by_probes() -> None:
    server = server_of(rendered())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        (command,) = server[probe]["exec"]["command"][2:]
        assert "-connect 127.0.0.1:8642" in command
    start = server["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 300
    alive = server["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 120


def options_of(documents: list[Json]) -> dict[str, Any]:
    """The options of `poise serve`, as the server would understand them."""
    server = server_of(documents)
    values = {each["name"]: each.get("value", SYSTEM) for each in server["env"]}
    words = [re.sub(r"\$\((\w+)\)", lambda found: str(values[found[1]]), each) for each in server["args"]]
    assert words[0] == "serve"
    context: click.Context = serve.make_context("serve", words[1:], parent=program_context())
    return context.params


def test_the_server_is_given_options_that_there_are() -> None:
    options = options_of(rendered())
    assert options["backend"] == "kubernetes"
    assert options["state"] == Path("/var/lib/poise/state")
    assert (options["listen"], options["agents"]) == ("0.0.0.0:8642", "0.0.0.0:8643")
    assert (options["tls_cert"], options["tls_key"]) == (
        Path("/var/lib/poise/tls/tls.crt"),
        Path("/var/lib/poise/tls/tls.key"),
    )
    assert options["fence"] == 300.0
    assert options["names"][0] == "poise.poise-system.svc"  # what agents are told
    assert not options["insecure"]
    environment = {each["name"]: each.get("value") for each in server_of(rendered())["env"]}
    assert environment["POISE_STATE"] == str(options["state"])


@EVERY_FOLDER
def test_server_sidecars_and_certificate_are_of_one_image_with_a_version(folder: str) -> None:
    documents = rendered(folder)
    image = server_of(documents)["image"]
    (first,) = the(documents, "StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    assert first["image"] == image == options_of(documents)["image"]
    assert image.rpartition(":")[2] == __version__


def overlay(tmp_path: Path, text: str) -> list[Json]:
    """The documents of an overlay with this text, beside those that there are."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, folder)
    (folder / "overlays" / "ours").mkdir()
    (folder / "overlays" / "ours" / "kustomization.yaml").write_text(text, encoding="utf-8")
    return rendered(folder / "overlays" / "ours")


@pytest.mark.parametrize(
    ("says", "image"),
    [
        ("newName: example/poise", "example/poise:0.1.0"),
        ("newName: localhost:5000/a/poise, newTag: '7'", "localhost:5000/a/poise:7"),
        ("digest: 'sha256:24a0c4b4'", "poise@sha256:24a0c4b4"),
    ],
)
def test_an_overlay_that_names_the_image_of_the_server_names_that_of_the_sidecars(
    says: str, image: str, tmp_path: Path
) -> None:
    documents = overlay(tmp_path, f"resources: [../../base]\nimages: [{{name: poise, {says}}}]\n")
    assert (server_of(documents)["image"], options_of(documents)["image"]) == (image, image)
    (first,) = the(documents, "StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    assert first["image"] == image


def test_the_service_leads_to_the_ports_of_the_server() -> None:
    documents = rendered()
    service = the(documents, "Service")
    template = the(documents, "StatefulSet")["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert the(documents, "StatefulSet")["spec"]["serviceName"] == service["metadata"]["name"]
    there = {each["name"]: each["containerPort"] for each in server_of(documents)["ports"]}
    assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == there == {"api": 8642, "agents": 8643}


@EVERY_FOLDER
def test_network_policies_select_what_there_is(folder: str) -> None:
    documents = rendered(folder)
    server = the(documents, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    pods = {SYSTEM: server, JOBS: {names.MANAGED_BY: names.MANAGER}}
    ports = {each["name"] for each in server_of(documents)["ports"]}
    for policy in of_kind(documents, "NetworkPolicy"):
        wanted = policy["spec"]["podSelector"]["matchLabels"]
        assert wanted.items() <= pods[policy["metadata"]["namespace"]].items(), policy["metadata"]["name"]
        for rule in policy["spec"].get("ingress", ()):
            assert {each["port"] for each in rule.get("ports", ())} <= ports
    (agents,) = the(documents, "NetworkPolicy", "poise-agents")["spec"]["ingress"]
    (source,) = agents["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": JOBS}
    assert source["podSelector"]["matchLabels"] == pods[JOBS]
    assert [each["port"] for each in agents["ports"]] == ["agents"]
    by_agents = [
        policy["metadata"]["name"]
        for policy in of_kind(documents, "NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        if policy["metadata"]["namespace"] == SYSTEM and "agents" in {each["port"] for each in rule.get("ports", ())}
    ]
    assert by_agents == ["poise-agents"]


def test_the_server_reaches_itself_the_api_server_and_any_name_service() -> None:
    """By its own service as well: `kubectl exec poise-0 -- poise nodes` calls the address that the server announces."""
    documents = rendered()
    policy = the(documents, "NetworkPolicy", "poise-egress")
    itself, names_of_hosts, api_server = policy["spec"]["egress"]
    (peer,) = itself["to"]
    assert peer == {"podSelector": policy["spec"]["podSelector"]}
    (api,) = (each["port"] for each in the(documents, "Service")["spec"]["ports"] if each["name"] == "api")
    assert itself["ports"] == [{"protocol": "TCP", "port": api}]
    # CoreDNS is in kube-system, OpenShift's name service in another namespace with another port, a node's cache is no pod.
    assert "to" not in names_of_hosts
    ports = [(each["protocol"], each["port"]) for each in names_of_hosts["ports"]]
    assert sorted(ports) == [("TCP", 53), ("TCP", 5353), ("UDP", 53), ("UDP", 5353)]
    assert api_server == {"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]}


def test_prometheus_finds_the_service(tmp_path: Path) -> None:
    documents = overlay(tmp_path, "resources: [../../base]\ncomponents: [../../components/prometheus]\n")
    monitor = the(documents, "ServiceMonitor")
    service = the(documents, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    assert endpoint["tlsConfig"]["serverName"] in options_of(documents)["names"]
    assert of_kind(rendered(), "ServiceMonitor") == []


def test_the_overlay_of_a_site_works_once_its_image_is_named() -> None:
    """It differs from the base by the image alone, so that no value in it is an example that has to be found and removed."""
    (named,) = yaml.safe_load((KUBERNETES / SITE / "kustomization.yaml").read_text(encoding="utf-8"))["images"]
    of_site, of_base = (yaml.safe_dump_all(rendered(folder)) for folder in (SITE, BASE))
    assert of_site == of_base.replace(f"poise:{__version__}", f"{named['newName']}:{named['newTag']}")
    assert of_site != of_base


def test_what_a_site_may_want_can_be_uncommented_in_part_or_as_a_whole(tmp_path: Path) -> None:
    text = (KUBERNETES / SITE / "kustomization.yaml").read_text(encoding="utf-8")
    items = re.findall(r"^#  - .*\n(?:#    .*\n)*", text, re.MULTILINE)
    assert len(items) == 8
    for number, item in enumerate(items):
        assert overlay(tmp_path / str(number), text.replace(item, item.replace("#", ""), 1)) != rendered(SITE), item
    documents = overlay(tmp_path / "all", re.sub(r"^#  ", "  ", text, flags=re.MULTILINE))
    assert sorted(granted(documents)) == sorted(ALWAYS)  # only-poise-jobs
    assert of_kind(documents, "ServiceMonitor")
    assert {"name": "TLS", "value": "/etc/poise/tls"} in server_of(documents)["env"]
    server = the(documents, "StatefulSet")["spec"]
    assert server["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast-ssd"
    assert server["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    options = options_of(documents)
    assert options["pull_secrets"] == ("registry",)
    assert (options["nodes"], options["policy"]) == ("example.com/pool=training,tier!=test", "themis")


def test_a_certificate_of_ones_own_takes_the_place_of_the_one_that_is_made(tmp_path: Path) -> None:
    documents = overlay(tmp_path, "resources: [../../base]\ncomponents: [../../components/own-certificate]\n")
    pod = the(documents, "StatefulSet")["spec"]["template"]["spec"]
    assert not pod.get("initContainers")
    assert options_of(documents)["tls_cert"] == Path("/etc/poise/tls/tls.crt")
    mounted = {each["name"]: each["mountPath"] for each in server_of(documents)["volumeMounts"]}
    assert mounted["tls"] == "/etc/poise/tls"
    assert {"secretName": "poise-tls", "defaultMode": 0o440} in [each.get("secret") for each in pod["volumes"]]
    assert sorted(granted(documents)) == sorted(ALWAYS | FOR_GANGS)


def test_the_certificate_is_one_that_python_believes_and_is_made_once(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    (first,) = the(rendered(), "StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    (script,) = first["args"]
    script = script.replace("/tmp/", f"{tmp_path}/").replace("/var/lib/poise", str(tmp_path))

    def run() -> bytes:
        environment = {"NAMESPACE": SYSTEM, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        subprocess.run([*first["command"], script], env=environment, check=True, capture_output=True, timeout=60)
        return (tmp_path / "tls" / "tls.crt").read_bytes()

    made = run()
    assert run() == made
    assert (tmp_path / "tls" / "tls.key").stat().st_mode & 0o777 == 0o600
    chain, key = tmp_path / "tls" / "tls.crt", tmp_path / "tls" / "tls.key"
    for host in [*options_of(rendered())["names"], "localhost", "127.0.0.1"]:
        _shake_hands(chain, key, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        _shake_hands(chain, key, "elsewhere")
    key.unlink()  # it was killed in between
    assert run() != made


def _shake_hands(chain: Path, key: Path, host: str) -> None:
    """A handshake in memory; it raises what a client would."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    trusting = ssl.create_default_context(cafile=chain)
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(up, down, server_side=True)
    client = trusting.wrap_bio(down, up, server_hostname=host)
    for _ in range(2):
        for each in (client, server):
            with suppress(ssl.SSLWantReadError):
                each.do_handshake()
    assert client.version() is not None


def test_no_file_names_a_registry() -> None:
    for path in (ROOT / "deploy").rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\b(docker\.io|ghcr\.io|quay\.io|gcr\.io|registry\.[a-z0-9-]+\.[a-z]+)\b", text), path


def test_the_image_is_built_from_files_that_there_are_and_runs_as_the_user_of_the_manifests() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for each in copied:
        assert (ROOT / each).exists(), each
        assert f"!{each}" in ignored
    pod = the(rendered(), "StatefulSet")["spec"]["template"]["spec"]
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}\n" in text
    assert 'ENTRYPOINT ["poise"]' in text
    assert " openssl " in text  # for the certificate, and for the probes
