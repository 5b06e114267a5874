"""Configurations of Kubernetes and what is wrong with them; TLS and credentials."""

import asyncio
import json
import ssl
import sys
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import a_certificate
from tests.fake_kubernetes import FakeKubernetes, FakeTransport

from poise.scheduler.model.errors import RequestError
from poise.service.backends.kubernetes import access
from poise.service.backends.kubernetes.access import TOKEN_SECONDS, KubeConfig, TokenFileCredential, load_config
from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError

Json = dict[str, Any]
ALL_PODS, POD_PATH = "/api/v1/pods", "/api/v1/namespaces/default/pods"


# Configurations


def write_config(path: Path, *, cluster: Any = None, user: Any = None, **more: Any) -> Path:
    """Write a kubeconfig of one context, `one`; keywords replace what stands at the top, and `None` removes it."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "https://k8s.test:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": {"token": "secret"} if user is None else user}],
        "contexts": [{"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "research"}}],
        "current-context": "one",
        **more,
    }
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    return path


def refusal(*arguments: Any) -> str:
    """Return the sentence with which a configuration is refused."""
    with pytest.raises(RequestError) as caught:
        load_config(*arguments)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_kubeconfig_that_is_named_is_used(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config")
    config = load_config(path, None, {"KUBECONFIG": "/nowhere", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (config.server, config.namespace) == ("https://k8s.test:6443", "research")
    assert config.source == f"{path}, context 'one'"
    assert asyncio.run(config.credential.authorization()).headers == {"Authorization": "Bearer secret"}


def test_files_of_a_list_are_merged_and_the_first_entry_of_a_name_counts(tmp_path: Path) -> None:
    first = write_config(tmp_path / "first", **{"current-context": None, "users": []})
    second = write_config(tmp_path / "second", cluster={"server": "https://other.test"}, user={"token": "second"})
    config = load_config(None, None, {"KUBECONFIG": f"{first}:{tmp_path}/missing:{second}"})
    assert config.server == "https://k8s.test:6443"
    assert asyncio.run(config.credential.authorization()).headers == {"Authorization": "Bearer second"}


def test_the_usual_file_is_used_and_a_context_may_be_named(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    two = {"name": "two", "context": {"cluster": "c"}}
    write_config(tmp_path / ".kube" / "config", contexts=[two], **{"current-context": "gone"})
    config = load_config(None, "two", {"HOME": str(tmp_path)})
    assert (config.namespace, config.source) == ("default", f"{tmp_path}/.kube/config, context 'two'")
    assert asyncio.run(config.credential.authorization()).headers == {}


def test_in_a_pod_its_service_account_is_used_and_its_token_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("one\n")
    (tmp_path / "namespace").write_text("poise-system\n")
    (tmp_path / "ca.crt").write_bytes(a_certificate(tmp_path)[0].read_bytes())
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443", "HOME": "/nowhere"}
    config = load_config(None, None, environ)
    assert (config.server, config.namespace) == ("https://[fd00::1]:6443", "poise-system")
    assert config.source == "the service account of this pod"
    assert isinstance(config.credential, TokenFileCredential)
    assert "no configuration for Kubernetes" in refusal(None, "other", environ), "a pod's account has no contexts"


def test_an_authority_of_a_pod_that_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("one")
    (tmp_path / "ca.crt").write_text("no certificate")
    assert f"{tmp_path}/ca.crt holds no certificates" in refusal(None, None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_without_any_configuration_all_ways_are_named(tmp_path: Path) -> None:
    said = refusal(None, None, {"HOME": str(tmp_path)})
    for way in ("--kubeconfig FILE", "KUBECONFIG", f"{tmp_path}/.kube/config", "in a pod"):
        assert way in said


@pytest.mark.parametrize(
    ("name", "environ"), [("missing", {}), (None, {"KUBECONFIG": "/nowhere/a:/nowhere/b"})], ids=["option", "variable"]
)
def test_a_file_that_does_not_exist_is_named(tmp_path: Path, name: str | None, environ: dict[str, str]) -> None:
    given = None if name is None else tmp_path / name
    assert refusal(given, None, environ) == f"{given or '/nowhere/a'}: no such kubeconfig file"


@pytest.mark.parametrize(
    ("context", "change", "said"),
    [
        ("two", {}, "there is no context 'two'; there are: one"),
        (None, {"current-context": None}, "no current context; name one with --context; there are: one"),
        (None, {"contexts": [], "current-context": None}, "name one with --context; there are none at all"),
        (None, {"clusters": []}, "context 'one': there is no cluster 'c'; there are none at all"),
        (None, {"users": [{"name": "v", "user": {}}]}, "context 'one': there is no user 'u'; there are: v"),
        (None, {"users": [{"user": {}}]}, "an entry of users is not of the form {name: …, user: {…}}"),
        (None, {"clusters": {"c": {}}}, "an entry of clusters is not of the form"),
        (None, {"contexts": ["one"]}, "an entry of contexts is not of the form"),
        (None, {"cluster": {"server": "k8s.test"}}, "cluster 'c': server is 'k8s.test'; it begins with https://"),
        (None, {"cluster": {"server": "https://k8s:port"}}, "cluster 'c': server is 'https://k8s:port', which is no URL"),
        (
            None,
            {"cluster": {"proxy-url": "socks5://localhost:1"}},
            "proxy-url is 'socks5://localhost:1'; Poise knows proxies",
        ),
        (None, {"cluster": {"server": 7}}, "cluster 'c': server is 7, not a text"),
        (None, {"cluster": {"certificate-authority-data": "%"}}, "certificate-authority-data is not base64"),
        (None, {"cluster": {"certificate-authority-data": "eA=="}}, "certificate-authority holds no certificates in PEM"),
        (None, {"cluster": {"certificate-authority": "gone.crt"}}, "gone.crt cannot be read: No such file or directory"),
        (None, {"user": {"client-certificate-data": "eA=="}}, "client-certificate and client-key go together"),
        (
            None,
            {"user": {"client-certificate-data": "eA==", "client-key-data": "eA=="}},
            "user 'u': the client certificate and its key cannot be used",
        ),
        (None, {"user": {"tokenFile": "gone"}}, "gone does not exist"),
        (None, {"user": {"username": "me", "password": "x"}}, "username cannot be used: the API server no longer takes"),
        (None, {"user": {"auth-provider": {"name": "gcp"}}}, "auth-provider cannot be used: it has been replaced by exec"),
        (None, {"user": {"exec": {}}}, "user 'u': exec has no command"),
        (None, {"user": {"exec": "login"}}, "user 'u': exec has no command"),
        (None, {"user": {"exec": {"command": "x", "interactiveMode": "Always"}}}, "'x' needs a terminal"),
        (None, {"user": {"exec": {"command": "x", "apiVersion": "v0"}}}, "exec has apiVersion 'v0'"),
        (None, {"user": {"exec": {"command": "x", "env": ["A=b"]}}}, "user 'u': an entry of env of exec is not of the form"),
    ],
)
def test_what_is_wrong_with_a_kubeconfig_is_said_in_one_sentence(
    tmp_path: Path, context: str | None, change: Json, said: str
) -> None:
    path = write_config(tmp_path / "config", **change)
    found = refusal(path, context, {})
    assert said in found
    assert str(path) in found


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "is not YAML"), ("- a", "is not a kubeconfig"), ("", "no current context")]
)
def test_a_file_that_is_no_kubeconfig_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    assert said in refusal(path, None, {})


# TLS and credentials


@asynccontextmanager
async def a_tls_server(chain: Path, key: Path) -> AsyncIterator[int]:
    """Serve `{}` on a port of this machine, to clients alone that show a certificate of this authority."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(chain))
    context.load_cert_chain(chain, key)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def version_from(config: KubeConfig) -> Json:
    client = KubeClient(config)
    try:
        return await client.get("/version")
    finally:
        await client.aclose()


def test_certificates_of_a_kubeconfig_authenticate_both_sides(tmp_path: Path) -> None:
    chain, key = a_certificate(tmp_path)

    async def work() -> None:
        async with a_tls_server(chain, key) as port:
            cluster = {
                "server": f"https://127.0.0.1:{port}",
                "certificate-authority": chain.name,
                "tls-server-name": "localhost",
            }
            data = {
                f"client-{name}-data": b64encode(path.read_bytes()).decode()
                for name, path in (("certificate", chain), ("key", key))
            }
            good = write_config(tmp_path / "good", cluster=cluster, user=data)
            assert await version_from(load_config(good, None, {})) == {}
            for name, change, user in (
                ("stranger", {}, {}),
                ("another-name", {"tls-server-name": "elsewhere"}, data),
                ("no-authority", {"certificate-authority": ""}, data),
            ):
                bad = load_config(write_config(tmp_path / name, cluster={**cluster, **change}, user=user), None, {})
                with pytest.raises(ApiUnavailableError, match="GET /version: "):
                    await version_from(bad)
            unchecked = {**cluster, "certificate-authority": "", "tls-server-name": "", "insecure-skip-tls-verify": True}
            assert (
                await version_from(load_config(write_config(tmp_path / "u", cluster=unchecked, user=data), None, {})) == {}
            )

    asyncio.run(work())


def plugin(path: Path, *statements: str) -> Json:
    """Write a credential plug-in that counts its calls, prints what it was told, and then does this."""
    counted = f"import json, os, pathlib, sys; n = pathlib.Path({str(path) + '.calls'!r}); n.open('a').write('x')"
    path.write_text("\n".join([counted, "calls = len(n.read_text())", *statements]))
    return {"exec": {"command": sys.executable, "args": ["-I", "-S", str(path)], "installHint": "ask  the\nhelp desk"}}


PRINTS_TOKEN = "print(json.dumps({'status': {'token': f'token-{calls}', **json.loads(os.environ.get('MORE', '{}'))}}))"


def credential_of(folder: Path, user: Json, **cluster: Any) -> KubeConfig:
    return load_config(write_config(folder / "config", user=user, cluster=cluster), None, {"PATH": "/usr/bin"})


def test_a_credential_plugin_is_asked_once_and_again_when_its_answer_is_refused(tmp_path: Path) -> None:
    fake = FakeKubernetes()
    config = credential_of(tmp_path, plugin(tmp_path / "login", PRINTS_TOKEN))

    async def work() -> None:
        client = KubeClient(config, transport=FakeTransport(fake))
        fake.bearers = {"token-1"}
        await asyncio.gather(*(client.get("/version") for _ in range(5)))
        assert (tmp_path / "login.calls").read_text() == "x"
        await client.get(ALL_PODS)
        fake.bearers = {"token-2"}  # the first was taken back
        await client.get(ALL_PODS)
        watch = client.watch(ALL_PODS, str(fake.version))
        fake.bearers = {"token-3"}
        fake_end = asyncio.get_running_loop().call_later(0.5, fake.end_watches)
        assert [event async for event in watch] == []
        fake_end.cancel()
        fake.bearers = set()
        with pytest.raises(ApiError, match="401 Unauthorized"):
            await client.get(ALL_PODS)
        await client.aclose()

    asyncio.run(work())
    assert (tmp_path / "login.calls").read_text() == "xxxx"


def test_a_credential_that_expires_soon_is_replaced_before(tmp_path: Path) -> None:
    more = {"name": "MORE", "value": json.dumps({"expirationTimestamp": "2001-01-01T00:00:00Z"})}
    user = plugin(tmp_path / "login", PRINTS_TOKEN)
    user["exec"]["env"] = [more]
    config = credential_of(tmp_path, user)
    for number in (1, 2):
        assert asyncio.run(config.credential.authorization()).headers["Authorization"] == f"Bearer token-{number}"


def test_a_credential_plugin_is_told_about_the_cluster(tmp_path: Path) -> None:
    user = plugin(tmp_path / "login", "print(json.dumps({'status': {'token': os.environ['KUBERNETES_EXEC_INFO']}}))")
    user["exec"]["provideClusterInfo"] = True
    config = credential_of(tmp_path, user, **{"tls-server-name": "k8s"})
    told = json.loads(asyncio.run(config.credential.authorization()).headers["Authorization"].removeprefix("Bearer "))
    assert told["spec"]["interactive"] is False
    assert told["spec"]["cluster"] == {"server": "https://k8s.test:6443/", "tls-server-name": "k8s"}


def test_a_certificate_of_a_plugin_serves_in_new_connections(tmp_path: Path) -> None:
    chain, key = a_certificate(tmp_path)
    pair = {"clientCertificateData": chain.read_text(), "clientKeyData": key.read_text()}
    user = plugin(tmp_path / "login", f"print(json.dumps({{'status': {pair!r}}}))")

    async def work() -> None:
        async with a_tls_server(chain, key) as port:
            cluster = {"server": f"https://localhost:{port}", "certificate-authority": str(chain)}
            assert await version_from(credential_of(tmp_path, user, **cluster)) == {}

    asyncio.run(work())


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("sys.exit('you are\\n not logged in')", "ended with exit code 1: you are not logged in"),
        ("sys.exit(3)", "ended with exit code 3: it said nothing"),
        ("print('hello')", "printed something that is no JSON"),
        ("print('[]')", "printed no ExecCredential with a status"),
        ("print('{\"status\": {}}')", "printed neither a token nor a certificate with its key"),
        (
            "print(json.dumps({'status': {'clientCertificateData': 'x', 'clientKeyData': 'y'}}))",
            "printed a client certificate that cannot be used",
        ),
        (
            "print(json.dumps({'status': {'token': 't', 'expirationTimestamp': 'soon'}}))",
            "printed the expirationTimestamp 'soon', which is no time",
        ),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said_in_one_sentence(tmp_path: Path, statement: str, said: str) -> None:
    config = credential_of(tmp_path, plugin(tmp_path / "login", statement))
    with pytest.raises(ApiUnavailableError) as caught:
        asyncio.run(config.credential.authorization())
    assert f"credential plug-in {sys.executable} {said}" in caught.value.text
    assert caught.value.text.endswith("(ask the help desk)")
    assert "\n" not in caught.value.text


def test_a_plugin_that_is_not_installed_is_named(tmp_path: Path) -> None:
    config = credential_of(tmp_path, {"exec": {"command": "no-such-login"}})
    with pytest.raises(ApiUnavailableError, match="credential plug-in no-such-login cannot be started: No such file"):
        asyncio.run(config.credential.authorization())


def test_a_token_file_is_read_again_after_a_minute_and_when_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    now = 0.0
    credential = TokenFileCredential(path, lambda: now)

    def token() -> str:
        return asyncio.run(credential.authorization()).headers["Authorization"].removeprefix("Bearer ")

    with pytest.raises(ApiUnavailableError, match="the token cannot be read: No such file"):
        token()
    path.write_text("one\n")
    assert token() == "one"
    path.write_text("two")
    assert token() == "one"
    now += TOKEN_SECONDS
    assert token() == "two"
    path.write_text("three")
    assert credential.forget(asyncio.run(credential.authorization()))
    assert token() == "three"
    now += TOKEN_SECONDS
    path.unlink()
    assert token() == "three", "while it is being replaced, the last one is used"
