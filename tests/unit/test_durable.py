"""Whatever has to be there after a power failure: its directory is forced to the disk after it got its name."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from poise.durable import replace_file
from poise.service.backends.local.lease_files import EXIT, ORDER, SET_UP, open_below, put
from poise.service.backends.local.state_dir import StateDir
from poise.worker.checkpoints import Checkpoints


class Disk:
    """What would be found after a power failure: names count once their directory was forced to the disk after them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._owed: set[str] = set()
        """Directories with names in them that could still be lost."""
        for name in ("replace", "rename"):
            patch.setattr(os, name, self._naming(getattr(os, name)))
        patch.setattr(os, "mkdir", self._making(os.mkdir))
        patch.setattr(os, "fsync", self._forcing(os.fsync))

    def holds(self, path: Path) -> bool:
        """It is there, and so are all directories above it, as far as this disk has seen them made."""
        return path.exists() and not self._owed.intersection(map(str, path.parents))

    def _naming(self, real: Callable[..., None]) -> Callable[..., None]:
        def named(before: object, after: object, **more: int) -> None:
            real(before, after, **more)
            self._owe(after, more.get("dst_dir_fd"))

        return named

    def _making(self, real: Callable[..., None]) -> Callable[..., None]:
        def made(path: object, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            real(path, mode, dir_fd=dir_fd)
            self._owe(path, dir_fd)

        return made

    def _owe(self, path: object, folder: int | None) -> None:
        where = os.path.dirname(os.path.abspath(os.fspath(path))) if folder is None else _path_of(folder)  # type: ignore[call-overload]
        self._owed.add(where)

    def _forcing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def forced(handle: int) -> None:
            real(handle)
            self._owed.discard(_path_of(handle))

        return forced


def _path_of(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("name", [ORDER, EXIT, SET_UP])
def test_order_and_end_of_a_run_survive_with_every_directory_above_them(name: str, disk: Disk, tmp_path: Path) -> None:
    folders = StateDir(tmp_path / "state")
    folders.make_run("7", 1)
    folders.put("7", 1, name, {"a": 1})
    folders.close()
    assert disk.holds(tmp_path / "state" / "jobs" / "7" / "runs" / "1" / name)


def test_second_run_of_a_job_survives_too(disk: Disk, tmp_path: Path) -> None:
    folders = StateDir(tmp_path / "state")
    for epoch in (1, 2):
        folders.make_run("7", epoch)
        folders.put("7", epoch, ORDER, {})
    folders.close()
    assert disk.holds(tmp_path / "state" / "jobs" / "7" / "runs" / "2" / ORDER)


def test_what_is_only_read_by_the_living_costs_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = open_below(os.open(tmp_path.parent, os.O_RDONLY), tmp_path.name)
    forced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda each: forced.append(_path_of(each)))
    put(handle, "lease.json", {})
    assert str(tmp_path) not in forced
    os.close(handle)


def test_file_of_the_service_survives(disk: Disk, tmp_path: Path) -> None:
    replace_file(tmp_path / "accounts.json", "{}")
    assert disk.holds(tmp_path / "accounts.json")


@pytest.mark.parametrize("is_folder", [False, True])
def test_checkpoint_survives_with_its_directory(is_folder: bool, disk: Disk, tmp_path: Path) -> None:
    def save(path: str) -> None:
        if is_folder:
            os.mkdir(path)
            path = os.path.join(path, "weights")
        Path(path).write_text("weights")

    checkpoints = Checkpoints(str(tmp_path / "new" / "checkpoint"))
    checkpoints.write(3, save)
    with suppress(OSError):
        checkpoints.set_aside(99)  # there is none
    assert disk.holds(tmp_path / "new" / "checkpoint" / "step-3" / ("weights" if is_folder else ""))
