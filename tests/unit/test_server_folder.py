"""The state directory: its owner's alone, one server at a time, files that are replaced as a whole. And where to listen."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from poise.durable import create_file, replace_file
from poise.scheduler.model.errors import RequestError
from poise.service.server.http.listener import BindAddress, Certificate, bind
from poise.service.server.startup import BindOptions
from poise.service.server.storage.state_dir import FolderLock, open_folder


def test_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        found = open_folder(tmp_path / "a" / "b" / "state")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in (found, found.parent, found.parent.parent)} == {0o700}
    assert open_folder(found) == found


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o770])
def test_directory_that_others_may_look_into_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(RequestError, match=rf"others may look into it \(mode {mode:04o}\); run chmod 700"):
        open_folder(folder)


def test_chmod_is_not_suggested_for_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "passwd").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(RequestError, match=r"others may look into it \(mode 0755\); name a directory of its own"):
        open_folder(tmp_path)


def test_place_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "state"):
        with pytest.raises(RequestError, match="--state"):
            open_folder(path)


def test_directory_is_held_by_one_server_at_a_time(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(RequestError, match=rf"another server holds it \(process {os.getpid()}\)"):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


def test_lock_has_the_same_name_again_and_that_of_a_copy_another(tmp_path: Path) -> None:
    names = []
    for folder in (tmp_path, tmp_path, tmp_path / "copy"):
        folder.mkdir(exist_ok=True)
        lock = FolderLock(folder)
        names.append(lock.name)
        lock.release()
    assert names[0] == names[1] != names[2]
    assert all(name is not None and name.isalnum() for name in names), "what Leadership asks for"


def test_lock_has_no_name_where_the_kernel_does_not_say_when_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poise.service.server.storage.state_dir.BOOT_ID", tmp_path / "missing")
    lock = FolderLock(tmp_path)
    assert lock.name is None
    lock.release()


def test_replaced_file_is_whole_and_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    path.chmod(0o644)
    path.with_name("file.json.new").write_text("left by a crash")
    replace_file(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_error_of_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as of_file:
        create_file(tmp_path / "admin.token", "secret")
    with pytest.raises(OSError, match="No space left") as of_lock:
        FolderLock(tmp_path)
    assert (of_file.value.filename, of_lock.value.filename) == (f"{tmp_path}/admin.token", f"{tmp_path}/lock")


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    create_file(path, "first")
    with pytest.raises(FileExistsError):
        create_file(path, "second")
    assert path.read_text() == "first"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8642", "127.0.0.1", 8642),
        ("[::1]:80", "::1", 80),
        ("[::1]", "::1", 8642),
        ("localhost", "localhost", 8642),
        ("gpu1:0", "gpu1", 0),
    ],
)
def test_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert BindAddress.parse(text) == BindAddress(host, port)


@pytest.mark.parametrize(
    "text",
    ["", ":", ":80", "a:", "a:b", "a:-1", "a:65536", "a:1_0", "a:٣", "a: 80", "8642", "0:80", "::1", "[::1", "::1]:80",
     "..:80", "http://127.0.0.1:80", "unix:/tmp/x", "a b:80", "é:80"],
)  # fmt: skip
def test_invalid_address_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(RequestError, match="expected HOST:PORT"):
        BindAddress.parse(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert BindOptions(BindAddress(host, 0)).check().allows("localhost:1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "gpu1.example.org"])
def test_other_addresses_need_tls_or_the_option_insecure(host: str) -> None:
    with pytest.raises(RequestError, match="give --tls-cert and --tls-key, or say --insecure"):
        BindOptions(BindAddress(host, 8642)).check()
    BindOptions(BindAddress(host, 8642), insecure=True).check()


def test_server_answers_to_the_name_it_listens_on_and_never_to_every_address(tmp_path: Path) -> None:
    hosts = BindOptions(BindAddress("gpu1", 1), insecure=True).check()
    assert hosts.allows("gpu1:1")
    assert not BindOptions(BindAddress("0.0.0.0", 1), insecure=True).check().allows("0.0.0.0:1")


def test_invalid_certificate_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("nonsense")
    with pytest.raises(RequestError, match="not a certificate and its key"):
        Certificate(tmp_path / "cert.pem", tmp_path / "key.pem").context()
    with pytest.raises(RequestError, match=r"--tls-key .* cannot be read"):
        Certificate(tmp_path / "cert.pem", tmp_path / "nothing.pem").context()


def test_port_in_use_is_reported_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RequestError, match=f"--listen 127.0.0.1:{port}: Address already in use"):
            bind(BindAddress("127.0.0.1", port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70, "a..b"])
def test_unknown_host_is_reported_in_one_line(host: str) -> None:
    with pytest.raises(RequestError, match=rf"--listen {host}:1: ") as error:
        bind(BindAddress(host, 1))
    assert "\n" not in str(error.value)
