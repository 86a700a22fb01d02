"""Faults: builds killed or out of disk at any file operation, damaged files of every kind, folders that cannot be
written, builders at once. Whatever happens, what is published is one whole set, and the next build mends the rest.

A fault is put into a forked child, at its n-th file operation, by an audit hook: it sees every open, rename, mkdir,
link and removal of the process, whichever library makes it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import SM, FakeCompiler

from qsa_cute.aot import build, sass, sources, verify
from qsa_cute.aot.store import Store
from qsa_cute.errors import ArtifactError
from qsa_cute.runtime import Store as Artifacts
from qsa_cute.variants import Variant

KILLS = 50
DAMAGES = 300  # of each kind of file
CHANGING = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate")
BUILT, UNPUBLISHED, REFUSED, CRASHED = range(4)  # exit statuses of a child

Hook = Callable[[str, tuple[object, ...]], None]


def operation(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether an audit event is one that changes a file system."""
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in CHANGING


def at(number: int, fault: Callable[[], None], lasting: bool = False) -> Hook:
    """An audit hook with `fault` at the number-th operation, or from it on."""
    count = iter(range(1 << 30))

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if operation(event, arguments):
            now = next(count)
            if now == number or (lasting and now > number):
                fault()

    return hook


def child(work: Callable[[], int], hook: Hook | None = None) -> int:
    """Run `work` in a fork; its return value as the exit status, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        status = CRASHED
        try:
            if hook is not None:
                sys.addaudithook(hook)
            status = work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def generations(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the generation that is compiled from now on: it stands at the end of each cubin. The disassembler, which
    only reads, answers from memory."""
    counts = Counter({"EXIT": 1})
    monkeypatch.setattr(sass, "opcodes", lambda _path: counts)
    compile_one, current = compiler.__call__, [0]

    def run_job(job) -> str:
        problem = compile_one(job)
        with Path(job.folder, f"{job.name}.cubin").open("ab") as file:
            file.write(f"generation {current[0]:4}".encode())
        return problem

    monkeypatch.setattr("qsa_cute.aot.compile.run_job", run_job)

    def choose(number: int) -> None:
        current[0] = number

    return choose


def building(root: Path, toys: list[Variant]) -> Callable[[], int]:
    def work() -> int:
        try:
            result = build.build(Store(root), toys, jobs=2, force=True)
        except ArtifactError as error:
            return REFUSED if str(error) else CRASHED
        if result.ok:
            return BUILT
        return UNPUBLISHED if all([*result.failed.values(), *result.unpublished.values()]) else CRASHED

    return work


def published(root: Path, toys: list[Variant]) -> int:
    """The generation of the set, which is whole, of one generation, and sound for verify and for a load."""
    assert verify.verify(root, (SM,), lock=False, evidence=False) == {SM: []}
    artifacts = Artifacts(root).read(SM)
    assert set(artifacts.variants) == {variant.name for variant in toys}
    found = {artifacts.cubin(record)[-4:] for record in artifacts.variants.values()}
    assert len(found) == 1
    return int(found.pop())


def count_operations(root: Path, toys: list[Variant]) -> int:
    """Of one undisturbed build."""
    read, write = os.pipe()
    assert child(building(root, toys), lambda *event: os.write(write, b".") if operation(*event) else None) == BUILT
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return len(file.read())


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith((".staging", ".old")))


@pytest.fixture
def root(tmp_path: Path, toys: list[Variant], generations: Callable[[int], None]) -> Path:
    """A published set of generation 1."""
    generations(1)
    assert building(tmp_path / "artifacts", toys)() == BUILT
    return tmp_path / "artifacts"


def test_builds_killed_at_any_point(root: Path, toys: list[Variant], generations: Callable[[int], None]) -> None:
    total, generation, ends = count_operations(root, toys), 1, Counter()
    points = random.Random(0).choices(range(total), k=KILLS)
    for point in points:
        generations(tried := generation + 1)
        ends[child(building(root, toys), at(point, lambda: os.kill(os.getpid(), signal.SIGKILL)))] += 1
        if (root / SM).exists():
            assert published(root, toys) in (generation, tried)
        else:  # killed between the two renames: the former set waits beside, and the next builder puts it back
            assert (root / f".old-{SM}").exists()
        with Store(root).writing():
            assert published(root, toys) in (generation, tried)
        assert leftovers(root) == []
        generations(generation := tried + 1)
        assert child(building(root, toys)) == BUILT
        assert published(root, toys) == generation
    assert ends == {-signal.SIGKILL: KILLS}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_fails_at_any_point(
    root: Path, toys: list[Variant], generations: Callable[[int], None], code: int
) -> None:
    """From the n-th operation on nothing can be created; a build says so and what was published stays whole."""

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    total, generation, ends = count_operations(root, toys), 1, Counter()
    for point in sorted({0, *random.Random(code).choices(range(total), k=12)}):
        generations(generation + 1)
        status = child(building(root, toys), at(point, fail, lasting=True))
        ends[status] += 1
        with Store(root).writing():
            found = published(root, toys)
        assert found == generation + (status == BUILT)
        generation = found
    assert set(ends) <= {BUILT, UNPUBLISHED, REFUSED}  # BUILT: what was left to do was to clear up
    assert ends[REFUSED] + ends[UNPUBLISHED] > len(ends)
    generations(generation + 1)
    assert building(root, toys)() == BUILT


@pytest.mark.parametrize("size", [0, 1, 100, 1000, 2000])
def test_files_that_cannot_grow(root: Path, toys: list[Variant], generations: Callable[[int], None], size: int) -> None:
    """The kernel itself refuses to write more than so many bytes to a file, wherever that falls."""
    generations(2)

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return building(root, toys)()

    assert child(work) in (UNPUBLISHED, REFUSED)
    assert published(root, toys) == 1


def test_a_folder_that_is_read_only(toys: list[Variant], generations: Callable[[int], None], capfd) -> None:
    generations(1)
    folder = Path(tempfile.mkdtemp(prefix="qsa-cute-"))
    try:
        folder.chmod(0o755)
        assert building(folder / "artifacts", toys)() == BUILT
        for path in (folder / "artifacts", folder / "artifacts" / SM):
            path.chmod(0o555)
        generations(2)

        def work() -> int:
            if not os.getuid():
                os.setuid(65534)  # root may write anywhere
            try:
                build.build(Store(folder / "artifacts"), toys, jobs=1, force=True)
            except ArtifactError as error:
                os.write(1, str(error).encode())
                return REFUSED
            return BUILT

        assert child(work) == REFUSED
        said = capfd.readouterr().out
        assert f"cannot write {folder / 'artifacts'}: Permission denied; choose another --output" in said
        assert published(folder / "artifacts", toys) == 1
    finally:
        shutil.rmtree(folder)


def test_builders_at_once(root: Path, toys: list[Variant], generations: Callable[[int], None]) -> None:
    """Six at the same time, three times over: those that come while another writes are told so, and nothing mixes."""
    generation, told = 1, Counter()
    for _ in range(3):
        begin, pids = time.monotonic() + 0.2, []
        for number in range(6):
            generations(generation + 1 + number)
            pids.append(os.fork())
            if not pids[-1]:
                time.sleep(max(0, begin - time.monotonic()))
                os._exit(building(root, toys)())
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert set(ends) <= {BUILT, REFUSED}
        assert BUILT in ends
        told.update(ends)
        found = published(root, toys)
        assert generation < found <= generation + 6
        generation += 6
        assert leftovers(root) == []
    assert told[REFUSED]


# Damaged files.


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with a byte changed, a piece cut out, doubled or overwritten, or cut short; never as it was."""
    found = bytearray(data)
    while bytes(found) == data:
        place, size = rng.randrange(len(data)), rng.choice((1, 1, 1, 4, 64, 1000))
        match rng.randrange(5):
            case 0:
                found[place] ^= 1 << rng.randrange(8)
            case 1:
                del found[place : place + size]
            case 2:
                found[place:place] = found[place : place + size]
            case 3:
                found[place : place + size] = rng.randbytes(len(found[place : place + size]))
            case 4:
                del found[place:]
    return bytes(found)


@pytest.fixture
def proven(built: Path) -> Path:
    """Built, locked, and with evidence."""
    verify.write_lock(built, (SM,))
    hashes = {name: entry["sha256"] for name, entry in verify.load(built, SM)["variants"].items()}
    record = {"schema": 1, "sm": SM, "variants": hashes, "tests": {"passed": 10, "failed": 0, "skipped": 0}}
    (built / "evidence").mkdir()
    (built / "evidence" / f"{SM}.json").write_text(json.dumps(record))
    return built


def damages(path: Path, seed: int) -> Iterator[bytes]:
    """Write one damage after the other over the file; each is also what is yielded. Whole again at the end."""
    whole, rng = path.read_bytes(), random.Random(seed)
    for _ in range(DAMAGES):
        data = damaged(whole, rng)
        path.write_bytes(data)
        yield data
    path.write_bytes(whole)


def load_all(root: Path) -> dict[str, bytes]:
    artifacts = Artifacts(root).read(SM)
    return {name: artifacts.cubin(record) for name, record in artifacts.variants.items()}


def test_damaged_cubins(proven: Path, toys: list[Variant]) -> None:
    path = proven / SM / f"{toys[0].name}.cubin"
    for _ in damages(path, seed=1):
        with pytest.raises(ArtifactError, match=r"rebuild it: python build_cutedsl\.py build --gpu-arch sm_90a"):
            load_all(proven)
        found = verify.verify(proven, (SM,), lock=True, evidence=True)[SM]
        assert len(found) == 1
        assert str(path) in found[0]


def test_damaged_manifests(proven: Path, toys: list[Variant]) -> None:
    """Refused, or, where only the spacing changed, read as it was written."""
    path = proven / SM / "manifest.json"
    whole, cubins = json.loads(path.read_bytes()), load_all(proven)
    digests = sources.Digests(sources.dsl_version())
    refused = 0
    for data in damages(path, seed=2):
        try:
            same = json.loads(data) == whole
        except ValueError:
            same = False
        if same:
            assert load_all(proven) == cubins
            continue
        refused += 1
        with pytest.raises(ArtifactError, match=r"manifest .* rebuild it: python build_cutedsl\.py build"):
            load_all(proven)
        assert str(path) in verify.verify(proven, (SM,), lock=True, evidence=True)[SM][0]
        assert len(build.plan(Store(proven), toys, digests)[0].todo) == len(toys)
    assert refused > 0.9 * DAMAGES


@pytest.mark.parametrize("name", ["lock.json", f"evidence/{SM}.json"])
def test_damaged_records(proven: Path, name: str) -> None:
    """A problem that names the file, or nothing where what is compared did not change."""
    path, key = proven / name, "evidence" if name.startswith("evidence") else "lock"
    whole = json.loads(path.read_bytes())
    found_out = 0
    for data in damages(path, seed=3):
        found = verify.verify(proven, (SM,), lock=key == "lock", evidence=key == "evidence")[SM]
        try:
            read = json.loads(data)
        except ValueError:
            read = None
        if read is None or not isinstance(read, dict) or read.get("variants") != whole["variants"]:
            assert found, data
            found_out += 1
        assert all(name.rsplit("/", 1)[-1] in problem or path.name in problem for problem in found), found
    assert found_out > DAMAGES // 2


def test_a_damaged_lock_is_not_written_over(proven: Path) -> None:
    (proven / "lock.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"lock\.json cannot be read.*take it from version control"):
        verify.write_lock(proven, (SM,))
    assert (proven / "lock.json").read_text() == "{"


def test_files_that_are_something_else(proven: Path, toys: list[Variant]) -> None:
    """A folder, a pipe or a link to nowhere in the place of a file."""
    for name in (f"{toys[0].name}.cubin", "manifest.json"):
        path = proven / SM / name
        whole = path.read_bytes()
        for put in (Path.mkdir, lambda p: p.symlink_to("nowhere")):
            path.unlink()
            put(path)
            with pytest.raises(ArtifactError, match=r"build_cutedsl\.py build"):
                load_all(proven)
            assert verify.verify(proven, (SM,), lock=True, evidence=True)[SM]
            shutil.rmtree(path) if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()
            path.write_bytes(whole)
        assert load_all(proven)


# A set replaced under those who read it.


def test_sets_replaced_while_they_are_loaded(
    root: Path, toys: list[Variant], generations: Callable[[int], None]
) -> None:
    """Readers see one set or the next, or are told to try again; never a mixture, a half or another error."""
    stop, wrong, seen = threading.Event(), [], Counter()

    def reader() -> None:
        while not stop.is_set():
            try:
                seen[len({data[-4:] for data in load_all(root).values()})] += 1
            except ArtifactError as error:
                seen["refused"] += 1
                if "build_cutedsl.py build" not in str(error):
                    wrong.append(error)
            except Exception as error:
                wrong.append(error)

    readers = [threading.Thread(target=reader) for _ in range(2)]
    for thread in readers:
        thread.start()
    try:
        for generation in range(2, 32):
            generations(generation)
            assert building(root, toys)() == BUILT
    finally:
        stop.set()
        for thread in readers:
            thread.join()
    assert not wrong
    assert seen[1] > 30
    assert set(seen) <= {1, "refused"}
