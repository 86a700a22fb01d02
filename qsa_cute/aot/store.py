"""The artifact folder: one builder at a time, and an SM's set is replaced whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qsa_cute.errors import ArtifactError
from qsa_cute.variants import SMS

LOCK = ".build.lock"
STAGING = ".staging-"
OLD = ".old-"  # an SM's former set, between the two renames of `publish`


class Store:
    """Writes under one root, e.g. `artifacts/`.

    Nothing but `publish` touches a published set, and `publish` only renames. Between its two renames a crash
    leaves the former set as `.old-<sm>`; the next builder puts it back.
    """

    def __init__(self, root: Path):
        self.root = root

    def folder(self, sm: str) -> Path:
        """Where an SM's published set is."""
        return self.root / sm

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Hold the folder for writing; yields an empty staging folder, removed at the end.

        Raises:
            ArtifactError: another builder holds it, or it cannot be written.
        """
        staging = self.root / f"{STAGING}{os.getpid()}"
        with ExitStack() as held:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((self.root / LOCK).open("a+"))
                self._take(lock.fileno())
                self._recover()
                staging.mkdir()
            except OSError as error:
                raise ArtifactError(f"cannot write {self.root}: {error.strerror}; choose another --output") from error
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def _take(self, lock: int) -> None:
        """The kernel drops the lock with the process, so a killed build leaves nothing to clear."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode() or "unknown"
            raise ArtifactError(
                f"another build (process {holder}) is writing {self.root}; wait for it, or choose another --output"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())

    def _recover(self) -> None:
        for leftover in self.root.glob(f"{STAGING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for former in self.root.glob(f"{OLD}*"):
            published = self.folder(former.name.removeprefix(OLD))
            if published.exists():
                shutil.rmtree(former, ignore_errors=True)
            else:
                former.rename(published)

    def publish(self, staged: Path, sm: str) -> None:
        """Make `staged` the set of `sm`. On an error the former set is back in its place."""
        published, former = self.folder(sm), self.root / f"{OLD}{sm}"
        if published.exists():
            published.rename(former)
        try:
            staged.rename(published)
        except OSError:
            if former.exists():
                former.rename(published)
            raise
        shutil.rmtree(former, ignore_errors=True)

    def clean(self, sms: tuple[str, ...]) -> list[Path]:
        """Remove the sets of `sms` and what a killed build left; the lock file of hashes and the evidence stay."""
        with self.writing():
            found = [self.folder(sm) for sm in sms if sm in SMS and self.folder(sm).exists()]
            for folder in found:
                shutil.rmtree(folder)
        return found


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
