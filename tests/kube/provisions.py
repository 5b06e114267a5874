"""What a pod gives its containers: volumes, environment, names.

Volumes: emptyDir, hostPath, projected (service account tokens by the API, downward API, config maps, secrets), each of these
alone, claims that are mapped to directories, images that have a root.
"""

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import httpx
from tests.kube.pods import Image, decoded, expand, gpus_of_container
from tests.kube.server import Admin, Json, KubeError

KEPT = sorted({str(Path(__file__).resolve().parents[2]), sys.prefix})
"""What images have of this machine although a volume may cover it: a checkout in /tmp, for example, in which it is run."""
AWAY = (httpx.HTTPError, OSError, HTTPException)
"""What is raised while there is no API server."""


class NotYetError(Exception):
    """Something that a pod needs does not exist, or not yet."""


class Provisions:
    """What the containers of one pod are given; `object` is the pod as it was last seen.

    claims    directories of this machine that are persistent volumes, by the names of claims
    image     finds an image by name
    resolve   may rewrite arguments and values of the environment
    """

    def __init__(
        self,
        api: Admin,
        pod: Json,
        folder: Path,
        ip: str,
        gpus: frozenset[int],
        *,
        claims: Mapping[str, Path],
        image: Callable[[str], Image | None],
        resolve: Callable[[str], str],
    ) -> None:
        self.object = pod
        self.spec: Json = pod["spec"]
        self.uid: str = pod["metadata"]["uid"]
        self.name: str = pod["metadata"]["name"]
        self.namespace: str = pod["metadata"]["namespace"]
        self.node: str = pod["spec"]["nodeName"]
        self.hostname: str = self.spec.get("hostname") or self.name[:63]
        self.folder = folder
        self.ip = ip
        self._api = api
        self._gpus = gpus
        self._claims = claims
        self._image = image
        self._resolve = resolve
        self._tokens: dict[tuple[str, str], str] = {}
        self._rendered: dict[str, dict[str, str]] = {}
        self._versions = itertools.count(1)
        self._told = self._tells(pod)
        self._is_stale = False
        (folder / "volumes").mkdir(parents=True)
        self.write_hosts([])

    def make(self) -> None:
        """Make all volumes; raise NotYetError if something is missing, and try again later."""
        for volume in self.spec.get("volumes", []):
            self._make_volume(volume)

    def rotate(self) -> None:
        """Have `refresh` get new tokens."""
        self._tokens.clear()
        self._is_stale = True

    def refresh(self) -> None:
        """Have volumes follow labels and annotations, as far as the server can be asked."""
        told = self._tells(self.object)
        if told == self._told and not self._is_stale:
            return
        with suppress(*AWAY, KubeError, NotYetError):
            for volume in self.spec.get("volumes", []):
                if volume["name"] in self._rendered:
                    self._render(volume)
            self._told, self._is_stale = told, False

    @staticmethod
    def _tells(pod: Json) -> tuple[object, object]:
        return pod["metadata"].get("labels"), pod["metadata"].get("annotations")

    def environment(self, spec: Json, image: Image) -> dict[str, str]:
        """Return the environment of a container."""
        made = {"PATH": image.path, "HOME": "/root", "HOSTNAME": self.hostname, **image.environment}
        if gpus_of_container(spec):
            made["NVIDIA_VISIBLE_DEVICES"] = ",".join(f"GPU-{self.node}-{each}" for each in sorted(self._gpus))
        for each in spec.get("envFrom", []):
            kind = "configMapRef" if "configMapRef" in each else "secretRef"
            for key, value in self._map(kind.removesuffix("Ref"), each[kind]["name"], each[kind].get("optional")).items():
                made[each.get("prefix", "") + key] = value
        for each in spec.get("env", []):
            found = self._value(each["valueFrom"]) if "valueFrom" in each else expand(each.get("value", ""), made)
            if found is not None:
                made[each["name"]] = self._resolve(found)
        return made

    def launch(self, spec: Json, image: Image, environment: Mapping[str, str]) -> Json:
        """Return what `container.py` is told."""
        command = spec.get("command") or image.entrypoint
        default = () if spec.get("command") else image.command
        argv = [self._resolve(expand(each, environment)) for each in [*command, *(spec.get("args") or default)]]
        context = {**self.spec.get("securityContext", {}), **spec.get("securityContext", {})}
        groups = [context["fsGroup"]] if "fsGroup" in context else []
        mounts = [{"source": str(self.folder / "hosts"), "target": "/etc/hosts", "read_only": False}]
        for each in spec.get("volumeMounts", []):
            source = self._source(each["name"]) / expand(each.get("subPathExpr") or each.get("subPath", ""), environment)
            if "subPath" in each or "subPathExpr" in each:
                source.mkdir(parents=True, exist_ok=True)
            read_only = each.get("readOnly", False) or self._is_image(each["name"])
            mounts.append({"source": str(source), "target": each["mountPath"], "read_only": read_only})
        return {
            "argv": argv or ["/no-command"],
            "environment": dict(environment),
            "cwd": spec.get("workingDir", "/"),
            "hostname": self.hostname,
            "uid": context.get("runAsUser"),
            "gid": context.get("runAsGroup", 0),
            "groups": [*groups, *context.get("supplementalGroups", [])],
            "mounts": mounts,
            "kept": KEPT,
        }

    def write_hosts(self, lines: Sequence[str]) -> None:
        """Write /etc/hosts in place: it is mounted."""
        text = "".join(f"{line}\n" for line in ["127.0.0.1 localhost", f"{self.ip} {self.hostname}", *lines])
        path = self.folder / "hosts"
        if path.exists() and path.read_text() == text:
            return
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        os.pwrite(file, text.encode(), 0)  # at once, so that no reader finds it empty
        os.ftruncate(file, len(text.encode()))
        os.close(file)

    def _value(self, source: Json) -> str | None:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            return self._resource(source["resourceFieldRef"])
        kind = "configMapKeyRef" if "configMapKeyRef" in source else "secretKeyRef"
        wanted = source[kind]
        return self._map(kind.removesuffix("KeyRef"), wanted["name"], wanted.get("optional")).get(wanted["key"])

    def _field(self, path: str) -> str:
        meta = self.object["metadata"]
        if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
            return str(meta.get(found[1], {}).get(found[2], ""))
        if path in ("metadata.labels", "metadata.annotations"):
            return "\n".join(f"{key}={json.dumps(value)}" for key, value in sorted(meta.get(path[9:], {}).items()))
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "spec.serviceAccountName": self.spec.get("serviceAccountName", ""),
            "status.podIP": self.ip,
            "status.podIPs": self.ip,
            "status.hostIP": "127.0.0.1",
        }
        if path not in known:
            raise NotYetError(f"the field {path} is not known")
        return str(known[path])

    def _resource(self, wanted: Json) -> str:
        amounts: Json = next(
            (each.get("resources", {}) for each in self.spec["containers"] if each["name"] == wanted.get("containerName")),
            {},
        )
        kind, _, what = wanted["resource"].partition(".")
        return str(amounts.get(kind, {}).get(what, "0"))

    def _map(self, kind: str, name: str, optional: bool | None) -> dict[str, str]:
        """Return what is in a config map or a secret."""
        plural = {"configMap": "configmaps", "secret": "secrets"}[kind]
        found = self._api.find(f"/api/v1/namespaces/{self.namespace}/{plural}/{name}")
        if found is None:
            if optional:
                return {}
            raise NotYetError(f'{kind.lower()} "{name}" not found')
        data: dict[str, str] = found.get("data", {})
        return data if kind == "configMap" else {key: decoded(value) for key, value in data.items()}

    # Volumes --------------------------------------------------------------------------------------------------------------

    def _volume(self, name: str) -> Json:
        found: Json = next(each for each in self.spec.get("volumes", []) if each["name"] == name)
        return found

    def _is_image(self, name: str) -> bool:
        return "image" in self._volume(name)

    def _source(self, name: str) -> Path:
        """Return the directory or file of this machine that a volume is."""
        volume = self._volume(name)
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self._claims[volume["persistentVolumeClaim"]["claimName"]]
        if "image" in volume:
            image = self._image(volume["image"]["reference"])
            assert image is not None
            assert image.root is not None
            return image.root
        return self.folder / "volumes" / name

    def _make_volume(self, volume: Json) -> None:
        path = self.folder / "volumes" / volume["name"]
        if "hostPath" in volume:
            if volume["hostPath"].get("type", "").endswith("DirectoryOrCreate"):
                Path(volume["hostPath"]["path"]).mkdir(parents=True, exist_ok=True)
            elif not Path(volume["hostPath"]["path"]).exists():
                raise NotYetError(f"hostPath {volume['hostPath']['path']} does not exist")
        elif "persistentVolumeClaim" in volume:
            if volume["persistentVolumeClaim"]["claimName"] not in self._claims:
                raise NotYetError(f"persistentvolumeclaim {volume['persistentVolumeClaim']['claimName']} not found")
        elif "image" in volume:
            image = self._image(volume["image"]["reference"])
            if image is None or image.root is None:
                raise NotYetError(f"image {volume['image']['reference']} cannot be pulled")
        elif "emptyDir" in volume:
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        else:
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
            self._render(volume)

    def _render(self, volume: Json) -> None:
        """Write the files of a volume all at once, as kubelets do: readers see the old ones or the new ones."""
        if "projected" in volume:
            sources, mode = volume["projected"].get("sources", []), volume["projected"].get("defaultMode", 0o644)
        else:
            kind = next((each for each in ("downwardAPI", "configMap", "secret") if each in volume), None)
            if kind is None:
                raise NotYetError(f"volume {volume['name']} is of a kind that is not known here: {sorted(volume)}")
            wanted = dict(volume[kind])
            mode = wanted.get("defaultMode", 0o644)
            wanted.setdefault("name", wanted.get("secretName", ""))
            sources = [{kind: wanted}]
        files: dict[str, str] = {}
        for source in sources:
            files |= self._files(volume["name"], source)
        if self._rendered.get(volume["name"]) == files:
            return
        self._rendered[volume["name"]] = files
        folder = self.folder / "volumes" / volume["name"]
        data = f"..{next(self._versions)}"
        for name, content in files.items():
            path = folder / data / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            path.chmod(mode)
        (folder / data).mkdir(exist_ok=True)
        old = (folder / "..data").readlink() if (folder / "..data").is_symlink() else None
        (folder / "..data_tmp").symlink_to(data)
        (folder / "..data_tmp").rename(folder / "..data")
        for name in {each.split("/")[0] for each in files}:
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        if old is not None:
            shutil.rmtree(folder / old, ignore_errors=True)

    def _files(self, volume: str, source: Json) -> dict[str, str]:
        if "serviceAccountToken" in source:
            path = source["serviceAccountToken"]["path"]
            if (volume, path) not in self._tokens:
                self._tokens[volume, path] = self._token(source["serviceAccountToken"])
            return {path: self._tokens[volume, path]}
        if "downwardAPI" in source:
            return {each["path"]: self._value(each) or "" for each in source["downwardAPI"].get("items", [])}
        kind = "configMap" if "configMap" in source else "secret"
        if kind not in source:
            raise NotYetError(f"volume {volume} has a source that is not known here: {sorted(source)}")
        data = self._map(kind, source[kind]["name"], source[kind].get("optional"))
        items = source[kind].get("items")
        return data if items is None else {each["path"]: data[each["key"]] for each in items}

    def _token(self, wanted: Json) -> str:
        account = self.spec.get("serviceAccountName")
        if not account:
            raise NotYetError(
                "a token needs spec.serviceAccountName: nothing sets it here, as that admission plug-in is off"
            )
        spec = {
            "audiences": [wanted["audience"]] if "audience" in wanted else [],
            "expirationSeconds": wanted.get("expirationSeconds", 3600),
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid},
        }
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token"
        return str(self._api.post(path, {"spec": spec})["status"]["token"])
