"""Outputs appear under their final name only when they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path

from recavsr.errors import InputError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file got too large for this disk or limit",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EROFS: "the disk is read-only",
    errno.EPIPE: "the program that reads the output has stopped",
    errno.ENAMETOOLONG: "the name is too long",
}


def write_error(name: str | Path, error: Exception) -> InputError:
    """Return the one-line reason why writing `name` failed."""
    number = getattr(error, "errno", None)
    reason = _REASONS.get(number) if number is not None else None
    return InputError(f"{name}: can't be written ({reason or getattr(error, 'strerror', None) or error})")


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk."""
    with contextlib.suppress(PermissionError):  # Windows can't open folders, and syncs what may be written
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class PendingOutput:
    """A file written beside its final place and moved there by `commit`; `discard` removes it.

    Written into the folder `place`, if given, it is left for the owner of that folder to remove.
    """

    def __init__(self, final: Path, *, overwrite: bool, place: Path | None = None) -> None:
        self.final = final
        parent = final.parent
        if not parent.is_dir():
            raise InputError(f"{final}: the folder {parent} does not exist")
        try:
            os.lstat(final)
        except FileNotFoundError:
            pass
        except OSError as error:  # a name that no file can have
            raise write_error(final, error) from None
        if final.exists() and not overwrite:
            raise InputError(f"{final}: exists already; choose another name, or --overwrite it")
        if final.is_dir():
            raise InputError(f"{final}: is a folder")
        if final.exists() and not final.is_file():
            raise InputError(f"{final}: is a pipe or a device, no file; -o - writes y4m to standard output")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"{final}: no permission to write into {parent}")
        self._overwrite = overwrite
        self._kept = place is not None
        self.path = _temporary(parent) if place is None else place / "output"

    def commit(self) -> None:
        """Give the finished file its final name."""
        if self.final.exists() and not self._overwrite:
            self.discard()
            raise InputError(f"{self.final}: was made by somebody else meanwhile; nothing was overwritten")
        try:
            os.replace(self.path, self.final)
        except OSError as error:
            self.discard()
            raise write_error(self.final, error) from None

    def discard(self) -> None:
        """Remove what was written, unless it lies in somebody's folder."""
        if not self._kept:
            self.path.unlink(missing_ok=True)


class PendingFiles:
    """Numbered files of one folder, written into a temporary folder beside it and moved by `commit`.

    Who writes into the temporary folder makes it. In the folder `place`, if given, it is left for the owner
    of that folder to remove.
    """

    def __init__(self, folder: Path, *, create: bool, place: Path | None = None) -> None:
        self.folder = folder
        parent = folder.parent if create else folder
        if not parent.is_dir():
            where = f"{folder}: the folder {parent}" if create else f"the folder {folder}"
            raise InputError(f"{where} does not exist")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"{folder}: no permission to write into {parent}")
        self._kept = place is not None
        self.path = _temporary(parent) if place is None else place / "pictures"

    def commit(self) -> None:
        """Move the finished files to their folder; others that lie there stay."""
        try:
            self.folder.mkdir(exist_ok=True)
            for path in sorted(self.path.iterdir()):
                os.replace(path, self.folder / path.name)
            self.path.rmdir()
        except OSError as error:
            self.discard()
            raise write_error(self.folder, error) from None

    def discard(self) -> None:
        """Remove what was written, unless it lies in somebody's folder."""
        if not self._kept:
            shutil.rmtree(self.path, ignore_errors=True)


def _temporary(folder: Path) -> Path:
    return folder / f".recavsr-{os.getpid()}-{secrets.token_hex(4)}.part"
