"""A copy of this package for containers of other images: what runners and `poise.worker` are made of.

All of the package is copied, though they need little of it: where the image has Poise too, its programs may find this copy
first, and have to find everything there.
"""

import hashlib
import os
import secrets
import shutil
from pathlib import Path

import poise
from poise.durable import make_folders

STAMP = ".installed"  # in the copy: what it is a copy of


def install(folder: Path, package: Path | None = None) -> bool:
    """Copy the package into a directory, in which programs find it; False: it is there already, the same.

    The copy has its name once it is complete. Everyone may read it: containers of a pod may have different users.

    package   directory of the package; None: of the one that is running
    """
    source = Path(poise.__file__).parent if package is None else package
    target = folder / source.name
    files = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(source)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    if _stamp(target) == digest.hexdigest():
        return False
    make_folders(folder, 0o755)
    part = folder / f".{source.name}-{secrets.token_hex(8)}"
    old = part.with_suffix(".old")
    try:
        for path in files:
            copy = part / path.relative_to(source)
            copy.parent.mkdir(0o755, parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(0o644)
        (part / STAMP).write_text(digest.hexdigest())
        for path in (part, *(each for each in part.rglob("*") if each.is_dir())):
            path.chmod(0o755)  # whatever the umask
        if target.exists():
            os.rename(target, old)
        os.rename(part, target)
    finally:
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)
    return True


def _stamp(target: Path) -> str | None:
    try:
        return (target / STAMP).read_text()
    except (OSError, UnicodeDecodeError):
        return None
