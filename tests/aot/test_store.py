"""Publishing: whole or not at all, one builder at a time, and a crash at any point leaves a usable set."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qsa_cute.aot.store import Store, link_or_copy
from qsa_cute.errors import ArtifactError

SM = "sm_90a"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store whose published set is one file saying "old"."""
    (tmp_path / SM).mkdir()
    (tmp_path / SM / "what").write_text("old")
    return Store(tmp_path)


def staged(folder: Path) -> Path:
    new = folder / SM
    new.mkdir()
    (new / "what").write_text("new")
    return new


def published(store: Store) -> str:
    return (store.folder(SM) / "what").read_text()


def leftovers(store: Store) -> set[str]:
    return {path.name for path in store.root.iterdir()} - {SM, ".build.lock"}


def test_publish_replaces_the_whole_set(store: Store) -> None:
    (store.folder(SM) / "gone").write_text("of the old set")
    with store.writing() as folder:
        store.publish(staged(folder), SM)
    assert published(store) == "new"
    assert [path.name for path in store.folder(SM).iterdir()] == ["what"]
    assert not leftovers(store)


def test_a_publish_that_fails_puts_the_old_set_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail_on_new(self: Path, target: Path) -> Path:
        if ".staging" in str(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(self, target)

    with store.writing() as folder:
        new = staged(folder)
        monkeypatch.setattr(Path, "rename", fail_on_new)
        with pytest.raises(OSError, match="No space left"):
            store.publish(new, SM)
    assert published(store) == "old"
    assert not leftovers(store)


def test_a_crash_between_the_renames_is_mended_by_the_next_builder(store: Store) -> None:
    store.folder(SM).rename(store.root / f".old-{SM}")
    with store.writing():
        assert published(store) == "old"
    assert not leftovers(store)


def test_a_crash_after_the_renames_keeps_the_new_set(store: Store) -> None:
    (store.root / f".old-{SM}").mkdir()
    (store.root / ".staging-1").mkdir()
    with store.writing():
        pass
    assert published(store) == "old"
    assert not leftovers(store)


def test_two_builders_at_once(store: Store) -> None:
    script = (
        "import pathlib, sys\nfrom qsa_cute.aot.store import Store\n"
        "with Store(pathlib.Path(sys.argv[1])).writing(): pass"
    )
    with store.writing():
        other = subprocess.run([sys.executable, "-c", script, store.root], capture_output=True, text=True)
    assert other.returncode != 0
    assert f"another build (process {os.getpid()}) is writing" in other.stderr
    assert "--output" in other.stderr


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ArtifactError, match=r"cannot write .*--output"),
        Store(tmp_path / "file" / "artifacts").writing(),
    ):
        pass


def test_clean_leaves_lock_and_evidence(store: Store) -> None:
    (store.root / "lock.json").write_text("{}")
    (store.root / "evidence").mkdir()
    assert store.clean((SM,)) == [store.folder(SM)]
    assert not store.folder(SM).exists()
    assert leftovers(store) == {"lock.json", "evidence"}


def test_link_or_copy_where_links_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "from").write_text("content")
    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to").read_text() == "content"
