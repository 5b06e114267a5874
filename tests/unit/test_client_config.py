"""Which server a command talks to."""

import json
import os
from pathlib import Path

import pytest

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.processes import start_of
from poise.service.client.config import NOTHING, Process, ServerAddress, find_server, state_folder

GONE = 2**22 + 1
"""No process has this number."""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"POISE_STATE": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def a_server(folder: Path, pid: int | None = None, token: str = "first") -> None:
    (folder / "state").mkdir(mode=0o700)
    (folder / "state/server.json").touch(mode=0o600)
    (folder / "state/server.json").write_text(json.dumps({"url": "http://127.0.0.1:8", "pid": pid or os.getpid()}))
    (folder / "state/admin.token").write_text(f"{token}\n")


def a_config(folder: Path, text: str = 'url = "https://far:1"\ntoken = "t"\nca = "/ca.pem"\n') -> None:
    (folder / "config/poise").mkdir(parents=True)
    (folder / "config/poise/client.toml").write_text(text)


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(RequestError) as caught:
        find_server(environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_where_nothing_is_known_the_error_says_what_to_do(environ: dict[str, str]) -> None:
    assert refusal(environ) == NOTHING


def test_the_environment_wins(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path)
    named = {**environ, "POISE_URL": "https://there:1", "POISE_TOKEN": "mine", "POISE_CA": "/ca.pem"}
    assert find_server(named) == ServerAddress("https://there:1", "mine", Path("/ca.pem"))
    assert refusal({**environ, "POISE_URL": "http://x:1"}) == "POISE_URL is http://x:1, and POISE_TOKEN is not set; set both"


def test_the_server_of_this_machine_is_found_by_what_it_left(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path)
    a_config(tmp_path)
    here = Process(os.getpid())
    assert find_server(environ) == ServerAddress("http://127.0.0.1:8", "first", process=here)
    assert find_server({**environ, "POISE_TOKEN": "mine"}) == ServerAddress("http://127.0.0.1:8", "mine", process=here)


def test_a_server_says_where_its_token_is_from(environ: dict[str, str], tmp_path: Path) -> None:
    a_config(tmp_path)
    assert str(find_server(environ).token_in).endswith("/poise/client.toml")
    a_server(tmp_path)
    assert find_server(environ).token_in == str(tmp_path / "state/admin.token")
    assert find_server({**environ, "POISE_TOKEN": "mine"}).token_in == "POISE_TOKEN"
    assert find_server({**environ, "POISE_TOKEN": "mine", "POISE_URL": "http://x:1"}).token_in == "POISE_TOKEN"


def test_others_bring_their_own_token(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path)
    (tmp_path / "state/admin.token").unlink()
    assert find_server({**environ, "POISE_TOKEN": "mine"}).token == "mine"


def test_a_server_that_is_gone_counts_only_where_nothing_else_is_known(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path, pid=GONE)
    assert find_server(environ).url == "http://127.0.0.1:8"
    a_config(tmp_path)
    assert find_server(environ) == ServerAddress("https://far:1", "t", Path("/ca.pem"))


def test_a_process_that_has_the_number_of_the_server_is_not_the_server() -> None:
    born = start_of(os.getpid())
    assert born is not None
    assert Process(os.getpid(), born).is_alive
    assert not Process(os.getpid(), born - 1).is_alive
    assert not Process(GONE, born).is_alive
    assert not Process(0).is_alive
    assert not Process(-1).is_alive


@pytest.mark.parametrize(
    "url",
    ["", "localhost:1", "ftp://x:1", "http://", "http://x:0", "http://x:99999", "http://[::1", "http://u:p@x:1", "http://@x:1?",
     "http://x:1/?a=1", "http://x:1#a", "http://a b:1", "http://x:1\n", "http://é:1"],
)  # fmt: skip
def test_what_is_no_address_of_a_server_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(RequestError, match="is no address of a server") as caught:
        ServerAddress(url, "t")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("url = 1", "'url' is not expected"),
        ('url = "http://x:1"', "something is missing"),
        ('url = "http://x:1"\ntoken = "t"\nproxy = "p"', "'proxy' is not expected"),
        ("url =", "client.toml: "),
        ('url = "ftp://x"\ntoken = "t"', "'ftp://x' is no address of a server"),
        ('url = "http://x:1"\ntoken = "a b"', "has characters that no token has"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    text: str, said: str, environ: dict[str, str], tmp_path: Path
) -> None:
    a_config(tmp_path, text)
    assert said in refusal(environ)


def test_a_configuration_that_is_no_text_is_refused_without_a_word_of_codecs(
    environ: dict[str, str], tmp_path: Path
) -> None:
    a_config(tmp_path)
    (tmp_path / "config/poise/client.toml").write_bytes(b"url = \xff")
    assert refusal(environ).endswith("client.toml: not UTF-8 text")


def test_what_a_server_left_may_be_damaged(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path)
    (tmp_path / "state/server.json").write_text('{"url": ')
    assert "server.json: damaged" in refusal(environ)


ANOTHER = "set POISE_TOKEN, or make another token with `poise serve --new-admin-token`"


def test_a_first_token_that_is_damaged_is_named_and_not_its_neighbour(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path)
    (tmp_path / "state/admin.token").write_bytes(b"\xff\xfe\n")
    assert refusal(environ) == f"{tmp_path}/state/admin.token: damaged; {ANOTHER}"
    assert find_server({**environ, "POISE_TOKEN": "mine"}).token == "mine"


def test_a_server_whose_first_token_was_deleted_is_not_said_to_be_unknown(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path)
    (tmp_path / "state/admin.token").unlink()
    where = f"{tmp_path}/state/admin.token"
    assert refusal(environ) == f"a server runs at http://127.0.0.1:8, and {where} is not there; {ANOTHER}"
    a_config(tmp_path)
    assert find_server(environ).url == "https://far:1"


def test_of_a_server_that_is_gone_nobody_needs_the_token(environ: dict[str, str], tmp_path: Path) -> None:
    a_server(tmp_path, pid=GONE)
    (tmp_path / "state/admin.token").unlink()
    assert refusal(environ) == NOTHING


@pytest.mark.parametrize("name", ["state", "state/server.json"])
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_could_have_written_is_not_believed(
    name: str, mode: int, environ: dict[str, str], tmp_path: Path
) -> None:
    a_server(tmp_path)
    (tmp_path / name).chmod(mode)
    said = (
        f"others may write to it (mode {mode:04o}), and could have your token sent elsewhere; set POISE_URL and POISE_TOKEN"
    )
    assert refusal(environ) == refusal({**environ, "POISE_TOKEN": "mine"}) == f"{tmp_path / name}: {said}"
    assert find_server({**environ, "POISE_URL": "http://x:1", "POISE_TOKEN": "mine"}).url == "http://x:1"


@pytest.mark.parametrize("name", ["state", "state/server.json"])
def test_what_somebody_else_owns_is_not_believed(
    name: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_server(tmp_path)
    me = os.geteuid()
    who = iter([me + 1] if name == "state" else [me, me + 1])  # as asked for the folder, and for the file
    monkeypatch.setattr(os, "geteuid", lambda: next(who))
    said = "belongs to another user, who could have your token sent elsewhere; set POISE_URL and POISE_TOKEN"
    assert refusal({**environ, "POISE_TOKEN": "mine"}) == f"{tmp_path / name}: {said}"


def test_the_state_is_where_the_desktop_says() -> None:
    assert state_folder({"POISE_STATE": "/s"}) == Path("/s")
    assert state_folder({"XDG_STATE_HOME": "/x"}) == Path("/x/poise")
    assert state_folder({}) == Path.home() / ".local/state/poise"


def test_a_token_is_never_shown() -> None:
    assert "secret" not in repr(ServerAddress("http://x:1", "secret"))
