"""The storage root: files appear in it whole, or not at all.

What is being written lies in a folder of its own inside the root, one per engine, so that it is on the same file system
and never among the records. The engine holds a lock in there for as long as it lives; the kernel drops it with the
process, however that ends. Who comes next removes the folders whose lock is free, and no others.
"""

import errno
import fcntl
import itertools
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WRITING, _GATE, _LOCK = ".writing-", ".writing.lock", "lock"
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Storage:
    """One engine's access to a storage root.

    Attributes:
        root: the folder, absolute.
        run: what tells this engine's files from those of others.

    Raises:
        ValueError: the root can't be made or written to.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.run = f"run-{uuid.uuid4().hex[:12]}"
        self._numbers = itertools.count()
        self._lock: int | None = None
        self._entering = threading.Lock()  # several writers share a storage
        try:
            self._enter()
        except OSError as error:
            raise ValueError(
                f"The storage root {self.root} can't be used: {error}. Name a folder that this process may write to."
            ) from error

    def _enter(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._folder = self.root / f"{_WRITING}{self.run}"
        with _locked(self.root / _GATE):
            for folder in self.root.glob(f"{_WRITING}run-*"):
                if _is_free(folder / _LOCK):
                    shutil.rmtree(folder, ignore_errors=True)
            self._folder.mkdir()
            self._lock = os.open(self._folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def create(self) -> tuple[int, Path]:
        """A new temporary file: its descriptor and its path. If somebody removed our folder, it is made again."""
        path = self._folder / f"{next(self._numbers)}.tmp"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            return os.open(path, flags, 0o644), path
        except FileNotFoundError:
            with self._entering:
                with suppress(FileNotFoundError):
                    return os.open(path, flags, 0o644), path  # another writer has made it again
                self._leave()
                self._enter()
                return os.open(path, flags, 0o644), path

    def _leave(self) -> None:
        # Once only: the number may be somebody else's file afterwards.
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                os.close(lock)

    def publish(self, temporary: Path, relative: str, replace: bool) -> Path:
        """Gives a finished and synced file its name, in one step that survives a crash.

        Args:
            relative: path under the root; folders are made. No part of it may be a symbolic link.
            replace: the name is known to be free. Else one that is taken is left as it is.

        Raises:
            OSError: it couldn't be done; there is no new file under that name.
        """
        *folders, name = relative.split("/")
        folder = self._open_folder(folders)
        try:
            if not replace and _exists(name, folder):
                raise _taken(relative)
            if replace or not _link(temporary, name, folder, relative):
                os.rename(temporary, name, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)
        return self.root / relative

    def touch(self, relative: str) -> None:
        """Makes an empty file; one that is there stays.

        Raises:
            OSError: it couldn't be made.
        """
        *folders, name = relative.split("/")
        folder = self._open_folder(folders)
        try:
            os.close(os.open(name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644, dir_fd=folder))
        finally:
            os.close(folder)

    def make_folder(self, relative: str) -> None:
        """Makes a folder under the root ahead of what is to be published there.

        Raises:
            OSError: it couldn't be made.
        """
        os.close(self._open_folder(relative.split("/")))

    def _open_folder(self, folders: list[str]) -> int:
        """Goes down part by part and follows no link, so that nobody can lead it out of the root."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        here = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in folders:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
                    os.fsync(here)
                try:
                    below = os.open(part, flags, dir_fd=here)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        reason = "a part of the path is a symbolic link or no folder"
                        raise NotADirectoryError(errno.ENOTDIR, reason, "/".join(folders)) from error
                    raise
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        return here

    def close(self) -> None:
        """Removes what was not finished."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._leave()


def _taken(relative: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "the name is taken, give another", relative)


def _link(temporary: Path, name: str, folder: int, relative: str) -> bool:
    """Unlike a rename, a link fails where the name is taken. False where the file system has no links."""
    try:
        os.link(temporary, name, dst_dir_fd=folder)
    except FileExistsError:  # since it was looked for
        raise _taken(relative) from None
    except OSError as error:
        if error.errno in _NO_HARD_LINKS:
            return False
        raise
    temporary.unlink()
    return True


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True  # it was made under the gate's lock, so its owner died in there
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
