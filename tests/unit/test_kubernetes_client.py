"""The client of the Kubernetes API: configurations and what is wrong with them, credentials, errors, lists, watches, mirror.

Requests go to a pretended server; what takes minutes happens in simulated time.
"""

import asyncio
import json
import ssl
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.certificates import a_certificate
from tests.fake_kubernetes import PODS, FakeKubernetes, FakeTransport, a_pod
from tests.simulated_time import clock, simulate

from poise.scheduler.model.errors import RequestError
from poise.service.backends.kubernetes import access
from poise.service.backends.kubernetes.access import TOKEN_SECONDS, KubeConfig, TokenFileCredential, load_config
from poise.service.backends.kubernetes.actions import Actions
from poise.service.backends.kubernetes.client import KubeClient, Page, PatchKind
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError, ExpiredError
from poise.service.backends.kubernetes.leadership import Leadership, LeadershipLostError
from poise.service.backends.kubernetes.mirror import LEAST_PAUSE, Change, Mirror

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
        await client.list(ALL_PODS)
        fake.bearers = {"token-2"}  # the first was taken back
        await client.list(ALL_PODS)
        watch = client.watch(ALL_PODS, str(fake.version))
        fake.bearers = {"token-3"}
        fake_end = asyncio.get_running_loop().call_later(0.5, fake.end_watches)
        assert [event async for event in watch] == []
        fake_end.cancel()
        fake.bearers = set()
        with pytest.raises(ApiError, match="401 Unauthorized"):
            await client.list(ALL_PODS)
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


# Requests that fail


def asking(work: Callable[[FakeKubernetes, KubeClient], Any]) -> None:
    """Do something with a client of a new server, in simulated time."""

    async def run() -> None:
        fake = FakeKubernetes()
        client = fake.client()
        try:
            await work(fake, client)
        finally:
            await client.aclose()

    simulate(run)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_error_that_may_pass_is_told_apart_and_says_for_how_long(status: int) -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.fail(status, retry_after=7)
        with pytest.raises(ApiUnavailableError) as caught:
            await client.post(POD_PATH, a_pod("p"))
        assert (caught.value.status, caught.value.retry_after) == (status, 7.0)
        assert caught.value.text.startswith(f"POST {POD_PATH}: {status} ")
        assert not fake.all(PODS)
        assert client.calls == {"create": 1}, "whether to try again is the caller's decision"

    asking(work)


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (404, "NotFound"), (409, "Conflict"), (422, "Invalid")])
def test_a_refusal_is_an_answer(status: int, reason: str) -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("p"))
        fake.deny("get", "services")
        asked = {
            403: client.get("/api/v1/namespaces/default/services/s"),
            404: client.get(f"{POD_PATH}/none"),
            409: client.patch(f"{POD_PATH}/p", {"metadata": {"uid": "another"}}),
            422: client.post(POD_PATH, a_pod("Not a name")),
        }
        with pytest.raises(ApiError) as caught:
            await asked.pop(status)
        for each in asked.values():
            each.close()
        assert (caught.value.status, caught.value.reason) == (status, reason)

    asking(work)


def test_an_eviction_that_a_budget_forbids_is_an_answer_and_an_overloaded_server_is_none() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("p", node="n", phase="Running"))
        fake.budget(0)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
        with pytest.raises(ApiError, match=r"429 TooManyRequests: .*disruption budget"):
            await client.post(f"{POD_PATH}/p/eviction", eviction)
        fake.fail(429)
        with pytest.raises(ApiUnavailableError):
            await client.post(f"{POD_PATH}/p/eviction", eviction)

    asking(work)


def test_a_read_is_sent_again_over_a_new_connection_and_a_write_is_not() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("p"))
        for how in ("drop", "drop-after"):
            fake.fail(how)
            assert (await client.get(f"{POD_PATH}/p"))["metadata"]["name"] == "p"
        fake.fail("drop", next=2)
        with pytest.raises(ApiUnavailableError, match="the connection broke"):
            await client.get(f"{POD_PATH}/p")
        for how, is_done in (("drop", False), ("drop-after", True)):
            fake.fail(how)
            with pytest.raises(ApiUnavailableError, match="the connection broke") as caught:
                await client.post(POD_PATH, a_pod(how))
            assert caught.value.status is None
            assert fake.exists(PODS, how) is is_done, "nobody but the server can say which"

    asking(work)


def test_a_server_that_is_away_or_does_not_answer_is_unavailable() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.pause()
        with pytest.raises(ApiUnavailableError, match=r"GET /version: no connection: "):
            await client.get("/version")
        fake.resume()
        fake.fail("hang")
        before = clock()
        with pytest.raises(ApiUnavailableError, match="no answer within 30 s"):
            await client.get("/version")
        assert clock() - before == pytest.approx(30.0)

    asking(work)


@pytest.mark.parametrize("content", [b"<html>a proxy</html>", b"[]"])
def test_something_else_at_the_address_is_no_kubernetes(content: bytes) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=content))

    async def work() -> None:
        with pytest.raises(ApiUnavailableError, match="is there a Kubernetes API at this address"):
            await KubeClient(KubeConfig("http://elsewhere.test"), transport=transport).get("/version")

    simulate(work)


def test_an_error_of_a_proxy_is_told_in_its_words() -> None:
    transport = httpx.MockTransport(
        lambda _request: httpx.Response(502, text="<h1>Bad\n Gateway</h1>", headers={"Retry-After": "x"})
    )

    async def work() -> None:
        with pytest.raises(ApiUnavailableError) as caught:
            await KubeClient(KubeConfig("http://elsewhere.test"), transport=transport).get("/version")
        assert caught.value.text == "GET /version: 502 BadGateway: <h1>Bad Gateway</h1>"
        assert caught.value.retry_after is None

    simulate(work)


def test_no_more_requests_are_under_way_than_there_are_connections() -> None:
    under_way = most = 0

    async def slow(_request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(1.0)
        under_way -= 1
        return httpx.Response(200, json={})

    async def work() -> None:
        client = KubeClient(KubeConfig("http://k8s.test"), transport=httpx.MockTransport(slow), connections=3)
        await asyncio.gather(*(client.get("/version") for _ in range(10)))
        assert most == 3
        assert clock() == pytest.approx(4.0)

    simulate(work)


# Changes that are made until they are done


def acting(work: Callable[[FakeKubernetes, Actions, Leadership], Any]) -> None:
    async def run(fake: FakeKubernetes, client: KubeClient) -> None:
        leadership = Leadership(fake.client(), "poise", "leader", "a", clock=clock)
        await leadership.acquire(lambda _text: None)
        holding = asyncio.create_task(leadership.hold())
        try:
            await work(fake, Actions(client, leadership), leadership)
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    asking(run)


def is_creation(verb: str, path: str) -> bool:
    return verb == "create" and path.endswith("/pods")


@pytest.mark.parametrize("fault", [429, 500, 503, "drop", "refuse", "hang"])
def test_a_change_is_tried_again_until_it_is_done(fault: int | str) -> None:
    async def work(fake: FakeKubernetes, actions: Actions, _: Leadership) -> None:
        fake.fail(fault, next=3, where=is_creation)
        await actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p")))
        assert [pod["metadata"]["name"] for pod in fake.all(PODS)] == ["p"]
        assert actions.unavailable is None

    acting(work)


def test_a_server_that_asks_to_be_left_alone_is_left_alone() -> None:
    async def work(fake: FakeKubernetes, actions: Actions, _: Leadership) -> None:
        fake.fail(429, where=is_creation, retry_after=4)
        began = clock()
        await actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p")))
        assert 4.0 <= clock() - began < 5.0

    acting(work)


def test_a_change_that_is_refused_or_not_wanted_any_more_is_not_tried_again() -> None:
    async def work(fake: FakeKubernetes, actions: Actions, _: Leadership) -> None:
        with pytest.raises(ApiError, match="404"):
            await actions.persist(lambda: actions.client.delete(f"{POD_PATH}/none"))
        fake.fail(503, next=100, where=is_creation)
        wanted = iter([True, True, False])
        assert await actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p")), lambda: next(wanted)) is None
        assert fake.requests.count(("create", POD_PATH)) == 2

    acting(work)


def test_who_does_not_lead_any_more_changes_nothing() -> None:
    async def work(fake: FakeKubernetes, actions: Actions, leadership: Leadership) -> None:
        fake.fail(503, next=100, where=is_creation)
        trying = asyncio.create_task(actions.persist(lambda: actions.client.post(POD_PATH, a_pod("p"))))
        await asyncio.sleep(3.0)
        await leadership.release()
        with pytest.raises(LeadershipLostError):
            await trying
        fake._faults.clear()
        with pytest.raises(LeadershipLostError):
            await actions.attempt(lambda: actions.client.post(POD_PATH, a_pod("p")))
        assert not fake.all(PODS)

    acting(work)


# Lists


def test_a_list_comes_in_pages_of_one_moment() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        for name in "abcde":
            fake.add(PODS, a_pod(name))
        pages: list[Page] = []
        async for page in client.pages(ALL_PODS, limit=2):
            pages.append(page)
            if len(pages) == 1:
                fake.remove(PODS, "e")
        assert [[pod["metadata"]["name"] for pod in page.items] for page in pages] == [["a", "b"], ["c", "d"], ["e"]]
        assert [(page.is_first, page.is_last) for page in pages] == [(True, False), (False, False), (False, True)]
        assert len({page.resource_version for page in pages}) == 1

    asking(work)


def test_a_list_that_expires_between_two_pages_is_begun_anew_with_larger_ones() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        for number in range(20):
            fake.add(PODS, a_pod(f"p{number:02}"))
        sizes: list[tuple[int, bool]] = []
        async for page in client.pages(ALL_PODS, limit=2):
            sizes.append((len(page.items), page.is_first))
            if len(sizes) == 2:
                fake.remove(PODS, "p00")
                fake.compact()
        assert sizes == [(2, True), (2, False), (16, True), (3, False)]
        fake.fail(410, next=1)
        with pytest.raises(ExpiredError):
            await client.list(ALL_PODS)
        listed = await client.list(ALL_PODS, limit=3)
        assert [pod["metadata"]["name"] for pod in listed.items] == [f"p{number:02}" for number in range(1, 20)]

    asking(work)


def test_a_list_is_of_what_was_selected() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.add(PODS, a_pod("here", node="n"))
        fake.add(PODS, a_pod("there", labels={"a": "b"}))
        for labels, fields, name in (("a in (b,c)", "", "there"), ("", "spec.nodeName=n", "here")):
            found = await client.list(ALL_PODS, labels=labels, fields=fields)
            assert [pod["metadata"]["name"] for pod in found.items] == [name]

    asking(work)


# Watches


def test_a_watch_tells_what_happens_and_ends_with_the_server_s_patience() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        opened: list[float] = []
        version = str(fake.version)
        fake.add(PODS, a_pod("a"))
        fake.add(PODS, a_pod("b"))
        fake.change(PODS, "a", {"metadata": {"labels": {"text": "x"}, "annotations": {"t": "1\u2028\u0085 2\r\n3"}}})
        fake.remove(PODS, "a")
        told = [
            (kind, thing["metadata"]["name"], (thing["metadata"].get("annotations") or {}).get("t"))
            async for kind, thing in client.watch(ALL_PODS, version, seconds=10.0, on_open=lambda: opened.append(clock()))
        ]
        text = "1\u2028\u0085 2\r\n3"
        assert told == [("ADDED", "a", None), ("ADDED", "b", None), ("MODIFIED", "a", text), ("DELETED", "a", text)]
        assert opened == [0.0]
        assert 9.0 <= clock() <= 11.0

    asking(work)


def test_a_watch_from_too_long_ago_has_expired() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        version = str(fake.version)
        fake.add(PODS, a_pod("a"))
        fake.compact()
        with pytest.raises(ExpiredError, match="410 Expired: watch /api/v1/pods: too old resource version"):
            [event async for event in client.watch(ALL_PODS, version)]
        fake.fail(410)
        with pytest.raises(ExpiredError):
            [event async for event in client.watch(ALL_PODS, str(fake.version))]

    asking(work)


@pytest.mark.parametrize(
    ("lines", "error", "said"),
    [
        (
            b'{"type":"ERROR","object":{"code":500,"reason":"InternalError","message":"etcd"}}\n',
            ApiUnavailableError,
            "500 Inter",
        ),
        (b'{"type":"ERROR","object":{"code":410,"reason":"Expired"}}\n', ExpiredError, "410 Expired"),
        (b'{"type":"ERROR","object":{"message":"odd"}}\n', ApiUnavailableError, "500 InternalServerError: .*odd"),
        (b'{"type":"ERROR","object":{"code":403,"reason":"Forbidden"}}\n', ApiError, "403 Forbidden"),
        (b"<html>\n", ApiUnavailableError, "a line of the answer is no event"),
        (b'{"type":"ADDED"}\n', ApiUnavailableError, "a line of the answer is no event"),
        (b'{"type":"ERROR","object":"odd"}\n', ApiUnavailableError, "a line of the answer is no event"),
        (b'{"type":"ADDED","object":{"kind":"Status"}}\n', ApiUnavailableError, "a line of the answer is no event"),
    ],
)
def test_an_error_in_the_stream_of_a_watch_is_raised(lines: bytes, error: type[Exception], said: str) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=lines))

    async def work() -> None:
        client = KubeClient(KubeConfig("http://k8s.test"), transport=transport)
        with pytest.raises(error, match=said):
            [event async for event in client.watch(ALL_PODS, "1")]

    simulate(work)


def test_a_watch_that_is_cut_in_the_middle_of_a_line_tells_nothing_of_it() -> None:
    whole = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "a", "uid": "1", "resourceVersion": "2"}}}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield whole[:10]
        yield whole[10:] + b"\n" + whole[:20]
        raise httpx.ReadError("reset")

    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=pieces()))

    async def work() -> None:
        watch = KubeClient(KubeConfig("http://k8s.test"), transport=transport).watch(ALL_PODS, "1")
        kind, thing = await anext(watch)
        assert (kind, thing["metadata"]["name"]) == ("ADDED", "a")
        with pytest.raises(ApiUnavailableError, match="watch /api/v1/pods: the connection broke: reset"):
            await anext(watch)

    simulate(work)


def test_a_watch_in_which_even_the_end_does_not_come_is_taken_to_be_dead() -> None:
    async def work(fake: FakeKubernetes, client: KubeClient) -> None:
        fake.silent = True
        with pytest.raises(ApiUnavailableError, match="watch /api/v1/pods: silent for too long"):
            [event async for event in client.watch(ALL_PODS, str(fake.version))]
        assert 300.0 <= clock() <= 360.0

    asking(work)


# Mirrors


class SmallPages(KubeClient):
    """A client whose lists have pages of two."""

    def pages(self, path: str, *, labels: str = "", fields: str = "", limit: int = 2) -> Any:
        return super().pages(path, labels=labels, fields=fields, limit=limit)


@dataclass
class Follower:
    """A mirror of pods, and what it has told: each change is checked against those before it."""

    fake: FakeKubernetes
    labels: str = ""
    known: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    told: list[tuple[str, str]] = field(default_factory=list)
    lists: int = 0

    def __post_init__(self) -> None:
        self.client = SmallPages(self.fake.config(), transport=FakeTransport(self.fake))
        self.mirror = Mirror(
            self.client, ALL_PODS, on_change=self._change, on_synced=self._sync, labels=self.labels, clock=clock
        )

    def _sync(self) -> None:
        self.lists += 1

    def _change(self, kind: Change, thing: Json) -> None:
        head = thing["metadata"]
        key, uid, version = (head["namespace"], head["name"]), head["uid"], int(head["resourceVersion"])
        before = self.known.get(key)
        self.told.append((kind, head["name"]))
        match kind:
            case Change.ADDED:
                assert before is None
                self.known[key] = uid, version
            case Change.MODIFIED:
                assert before is not None
                assert (before[0], before[1] < version) == (uid, True)
                self.known[key] = uid, version
            case Change.DELETED:
                assert before is not None
                assert before[0] == uid
                del self.known[key]

    def truth(self) -> dict[tuple[str, str], tuple[str, int]]:
        """What the server has."""
        heads = [pod["metadata"] for pod in self.fake.all(PODS, self.labels)]
        return {(head["namespace"], head["name"]): (head["uid"], int(head["resourceVersion"])) for head in heads}


def following(work: Callable[[FakeKubernetes, Follower], Any], labels: str = "") -> None:
    """Do something while a mirror follows."""

    async def run() -> None:
        fake = FakeKubernetes()
        follower = Follower(fake, labels)
        running = asyncio.create_task(follower.mirror.run())
        try:
            await work(fake, follower)
            assert not running.done(), "a mirror goes on for ever"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await follower.client.aclose()

    simulate(run)


def is_behind(mirror: Mirror) -> bool:
    return (mirror.problem, mirror.behind_since) != (None, None)


def requests(fake: FakeKubernetes, verb: str) -> int:
    return sum(each == verb for each, _ in fake.requests)


def test_a_mirror_goes_on_where_a_watch_ended_or_broke() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        fake.add(PODS, a_pod("a"))
        await follower.mirror.synced.wait()
        for number, interrupt in enumerate((fake.end_watches, fake.break_watches, fake.end_watches)):
            await asyncio.sleep(5.0)
            interrupt()
            fake.add(PODS, a_pod(f"b{number}"))
            await asyncio.sleep(5.0)
            assert follower.known == follower.truth()
        assert (follower.lists, requests(fake, "watch")) == (1, 4)
        assert follower.mirror.problem is None

    following(work)


def test_a_mirror_whose_watch_has_expired_lists_again_and_tells_only_what_differs() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        for name in "abcd":
            fake.add(PODS, a_pod(name))
        await asyncio.sleep(1.0)
        follower.told.clear()
        fake.pause()
        fake.remove(PODS, "a")
        fake.remove(PODS, "b")
        fake.add(PODS, a_pod("b"))
        fake.change(PODS, "c", {"metadata": {"labels": {"x": "y"}}})
        fake.compact()
        fake.resume()
        await asyncio.sleep(30.0)
        assert sorted(follower.told) == [("ADDED", "b"), ("DELETED", "a"), ("DELETED", "b"), ("MODIFIED", "c")]
        assert follower.told.index(("DELETED", "b")) < follower.told.index(("ADDED", "b"))
        assert (follower.lists, follower.known) == (2, follower.truth())

    following(work)


def test_a_mirror_says_since_when_it_is_behind_and_why() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        mirror = follower.mirror
        assert mirror.problem == "not listed yet"
        assert mirror.behind_since == 0.0
        await asyncio.sleep(100.0)
        assert not is_behind(mirror)
        fake.pause()
        await asyncio.sleep(60.0)
        assert mirror.problem == f"watch {ALL_PODS}: the connection broke: All connection attempts failed"
        assert mirror.behind_since == pytest.approx(100.0)
        assert requests(fake, "watch") < 5, "an absent server is not flooded when it comes back"
        fake.resume()
        await asyncio.sleep(15.0)
        assert not is_behind(mirror)

    following(work)


def test_bookmarks_keep_a_mirror_of_a_quiet_collection_from_expiring() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        await asyncio.sleep(10.0)
        for _ in range(10):
            fake.add("configmaps", {"metadata": {"name": f"other-{fake.version}"}})
        fake.bookmark()
        await asyncio.sleep(0.1)
        assert follower.mirror.heard == clock() - 0.1
        fake.compact()
        fake.end_watches()
        await asyncio.sleep(10.0)
        assert (follower.lists, follower.told) == (1, [])

    following(work)


def test_a_mirror_heeds_how_long_the_server_wants_to_be_left_alone() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        fake.fail(429, where=lambda verb, _path: verb == "list", retry_after=8)
        await follower.mirror.synced.wait()
        assert 8.0 <= clock() < 9.0

    following(work)


def test_a_server_that_ends_each_watch_at_once_is_not_flooded() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        await follower.mirror.synced.wait()
        for _ in range(600):
            fake.end_watches()
            await asyncio.sleep(0.1)
        assert requests(fake, "watch") < 60.0 / LEAST_PAUSE
        fake.add(PODS, a_pod("a"))
        await asyncio.sleep(15.0)
        assert follower.known == follower.truth()

    following(work)


def test_rights_that_are_taken_away_and_given_back_are_waited_for() -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        fake.deny("list", PODS)
        fake.add(PODS, a_pod("a"))
        await asyncio.sleep(60.0)
        assert follower.mirror.problem is not None
        assert "403 Forbidden" in follower.mirror.problem
        fake.denied.clear()
        await asyncio.sleep(15.0)
        assert follower.known == follower.truth()

    following(work)


STEPS = st.one_of(
    st.tuples(st.sampled_from(["add", "add", "change", "move", "remove", "replace"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["end", "break", "compact", "bookmark", "pause", "resume", "silent", "loud"]), st.just(0)),
    st.tuples(st.sampled_from([409, 410, 429, 500, 503, "drop", "drop-after", "refuse", "hang"]), st.integers(1, 4)),
    st.tuples(st.just("turns"), st.integers(1, 12)),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, 7.0, 40.0, 400.0])),
)


def strike(fake: FakeKubernetes, what: str | int, how: int) -> None:
    """Spoil something, or change something on the server."""
    spoil: dict[str | int, Callable[[], None]] = {
        "end": fake.end_watches,
        "break": fake.break_watches,
        "compact": fake.compact,
        "bookmark": fake.bookmark,
        "pause": fake.pause,
        "resume": fake.resume,
        "silent": lambda: setattr(fake, "silent", True),
        "loud": lambda: setattr(fake, "silent", False),
    }
    if what in ("add", "change", "move", "remove", "replace"):
        alter(fake, str(what), f"p{how}")
    elif what in spoil:
        spoil[what]()
    else:
        fake.fail(what, next=how, retry_after=5 if what == 429 else None)


def alter(fake: FakeKubernetes, what: str, name: str) -> None:
    """Change a pod, as far as it is there."""
    is_there = fake.exists(PODS, name)
    if is_there and what in ("remove", "replace"):
        fake.remove(PODS, name)
    if what == "replace" or (what == "add" and not is_there):
        fake.add(PODS, a_pod(name, labels={"team": "a"}))
    if is_there and what == "change":
        fake.change(PODS, name, {"metadata": {"annotations": {"version": str(fake.version)}}})
    if is_there and what == "move":
        fake.change(PODS, name, {"metadata": {"labels": {"team": "ab"[fake.version % 2]}}})


@settings(max_examples=3 * settings().max_examples)
@given(steps=st.lists(STEPS, max_size=60), labels=st.sampled_from(["", "team=a"]))
def test_whatever_goes_wrong_a_mirror_tells_consistent_changes_and_ends_as_the_server(
    steps: list[tuple[str | int, Any]], labels: str
) -> None:
    async def work(fake: FakeKubernetes, follower: Follower) -> None:
        for what, how in steps:
            if what == "wait":
                await asyncio.sleep(how)
            elif what == "turns":
                for _ in range(how):
                    await asyncio.sleep(0)
            else:
                strike(fake, what, how)
        fake._faults.clear()
        fake.resume()
        fake.silent = False
        await asyncio.sleep(500.0)  # a watch that has died without a word is given up after six minutes
        assert follower.known == follower.truth()
        assert len(follower.mirror) == len(follower.known)
        assert not is_behind(follower.mirror)
        assert follower.mirror.synced.is_set()

    following(work, labels)


def test_a_patch_that_applies_is_poise_s_own() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    async def work() -> None:
        client = KubeClient(KubeConfig("http://k8s.test"), transport=httpx.MockTransport(answer))
        await client.patch(f"{POD_PATH}/p", {}, PatchKind.APPLY)
        assert seen[0].headers["Content-Type"] == "application/apply-patch+yaml"
        assert dict(seen[0].url.params) == {"fieldManager": "poise", "force": "true"}

    simulate(work)
