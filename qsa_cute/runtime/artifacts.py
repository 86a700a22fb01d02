"""Finds, reads and checks built artifacts. Pure Python: no CUDA, no compiler, nothing at import.

A store is a folder with one sub-folder per SM, each holding cubins and a manifest.json (docs/artifacts.md).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qsa_cute.abi import KINDS, MANIFEST, bad_manifest, build_command, read_head
from qsa_cute.errors import ArgumentError, ArtifactError
from qsa_cute.runtime import sm as sm_rules
from qsa_cute.variants import SMS

ENVIRONMENT = "QSA_CUTE_ARTIFACTS"

_PACKAGE = Path(__file__).resolve().parents[1]
_Json = Mapping[str, Any]


class Wanted(NamedTuple):
    """What a caller asks for; hashable, so that it can be the key of a look-up.

    Attributes:
        kernel: the registry's kernel name, such as "sparse_decode".
        head_dim: 256 or 128.
        dtype: "bf16", "fp16" or "fp8_e4m3".
        baked: baked constants that must match, as sorted pairs; empty takes whatever was built.
    """

    kernel: str
    head_dim: int
    dtype: str
    baked: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(key: Any) -> Wanted:
        """From a `Wanted`, a (kernel, head_dim, dtype[, baked]) tuple, or anything with those attributes.

        Raises:
            ArgumentError: the key is none of these.
        """
        if isinstance(key, Wanted):
            return key
        if not isinstance(key, tuple) and hasattr(key, "kernel"):
            key = (key.kernel, key.head_dim, key.dtype, key.baked)
        if not isinstance(key, tuple) or len(key) not in (3, 4):
            raise ArgumentError(f"a kernel is asked for as (kernel, head_dim, dtype, baked or None), got {key!r}")
        baked = (key[3] if len(key) == 4 else None) or ()
        return Wanted(key[0], key[1], key[2], tuple(sorted(dict(baked).items())))

    def __str__(self) -> str:
        baked = "".join(f" {name}={value}" for name, value in self.baked)
        return f"{self.kernel} d{self.head_dim} {self.dtype}{baked}"


@dataclass(frozen=True, slots=True)
class ParamRecord:
    """One kernel parameter: name, kind ("ptr", "i64", "i32", "f32"), byte offset and size."""

    name: str
    kind: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class VariantRecord:
    """One cubin as its manifest describes it; sizes in bytes.

    `early_launch`: the kernel waits for the kernels before it by itself (griddepcontrol), so it is launched with
    programmatic stream serialization and its start overlaps their end.
    """

    name: str
    kernel: str
    head_dim: int
    dtype: str
    baked: Mapping[str, int]
    file: str
    sha256: str
    size: int
    symbol: str
    threads: int
    smem_bytes: int
    static_smem_bytes: int
    early_launch: bool
    params: tuple[ParamRecord, ...]
    param_bytes: int

    def answers(self, wanted: Wanted) -> bool:
        """Whether this cubin is what was asked for."""
        return (self.kernel, self.head_dim, self.dtype) == wanted[:3] and all(
            self.baked.get(name) == value for name, value in wanted.baked
        )


@dataclass(frozen=True, slots=True)
class ArtifactSet:
    """The cubins of one SM: a folder whose manifest was read and found sound."""

    folder: Path
    sm: str
    dsl_version: str
    ptxas_version: str
    source_digest: str
    variants: Mapping[str, VariantRecord]

    @staticmethod
    def read(folder: Path) -> ArtifactSet:
        """Read `folder`'s manifest and check all that can be checked without the cubins.

        Raises:
            ArtifactError: missing, unreadable, of another schema or ABI, or inconsistent.
        """
        reader = _ManifestReader(folder)
        manifest = reader.load()
        variants = {name: reader.variant(name, record) for name, record in manifest["variants"].items()}
        versions = {key: str(manifest.get(key, "")) for key in ("dsl_version", "ptxas_version", "source_digest")}
        return ArtifactSet(folder=folder, sm=folder.name, variants=variants, **versions)

    @property
    def min_driver(self) -> int:
        """Oldest driver for these cubins, as cuDriverGetVersion counts: the first of their ptxas' major."""
        major = self.ptxas_version.split(".")[0]
        return int(major) * 1000 if major.isdecimal() else 0

    def find(self, wanted: Wanted) -> VariantRecord | None:
        """The one variant that answers, or None.

        Raises:
            ArgumentError: several do; the message tells them apart.
        """
        found = [record for record in self.variants.values() if record.answers(wanted)]
        if len(found) > 1:
            names = ", ".join(sorted(record.name for record in found))
            raise ArgumentError(f"{wanted} is ambiguous in {self.folder}: {names}; say which by its baked constants")
        return found[0] if found else None

    def cubin(self, record: VariantRecord) -> bytes:
        """The bytes of a variant, with size and sha256 as the manifest has them.

        Raises:
            ArtifactError: missing, truncated or altered.
        """
        path = self.folder / record.file
        try:
            data = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise self._bad(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
        if len(data) != record.size:
            raise self._bad(path, f"has {len(data)} bytes where its manifest says {record.size}")
        found = hashlib.sha256(data).hexdigest()
        if found != record.sha256:
            raise self._bad(path, f"has sha256 {found[:12]}... where its manifest says {record.sha256[:12]}...")
        return data

    def _bad(self, path: Path, what: str) -> ArtifactError:
        return ArtifactError(f"cubin {path} {what}; rebuild it: {build_command(self.sm, self.folder.parent)}")


class _ManifestReader:
    """Parses one manifest; every complaint names the file and the mending command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> _Json:
        manifest = read_head(self.folder)
        if manifest is None:
            raise self._bad("cannot be read (No such file or directory)")
        return manifest

    def variant(self, name: str, record: Any) -> VariantRecord:
        text: dict[str, Any] = {
            key: self._field(name, record, key, str) for key in ("kernel", "dtype", "file", "sha256", "symbol")
        }
        numbers: dict[str, Any] = {
            key: self._field(name, record, key, int)
            for key in ("head_dim", "size", "threads", "smem_bytes", "static_smem_bytes", "param_bytes")
        }
        if Path(text["file"]).name != text["file"] or "\\" in text["file"]:
            raise self._bad(f"names the file {text['file']!r} for {name}, which leaves its folder")
        baked = self._field(name, record, "baked", dict)
        params = tuple(self._param(name, param) for param in self._field(name, record, "params", list))
        end = 0
        for param in params:
            if param.offset < end or param.offset % param.size:
                raise self._bad(f"puts parameter {param.name} of {name} at {param.offset}, overlapping or unaligned")
            end = param.offset + param.size
        if end > numbers["param_bytes"]:
            raise self._bad(f"gives {name} {numbers['param_bytes']} parameter bytes, its parameters need {end}")
        early = self._field(name, record, "early_launch", bool)
        return VariantRecord(name=name, baked=baked, params=params, early_launch=early, **text, **numbers)

    def _param(self, name: str, record: Any) -> ParamRecord:
        param = ParamRecord(
            name=self._field(name, record, "name", str),
            kind=self._field(name, record, "kind", str),
            offset=self._field(name, record, "offset", int),
            size=self._field(name, record, "size", int),
        )
        sound = param.name.isidentifier() and param.kind in KINDS
        if not sound or param.size != struct.calcsize("<" + KINDS[param.kind]):
            raise self._bad(f"describes a parameter of {name} that cannot be packed: {param}")
        return param

    def _field(self, name: str, record: Any, key: str, kind: type) -> Any:
        value = record.get(key) if isinstance(record, dict) else None
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise self._bad(f"has {key} = {value!r} for {name}, where a {kind.__name__} belongs")
        return value

    def _bad(self, what: str) -> ArtifactError:
        return bad_manifest(self.folder, what)


class Store:
    """A folder of artifact sets. Manifests are read at first use and kept until `forget`.

    Args:
        path: the folder; None looks in the places that `find_root` names.

    Raises:
        ArtifactError: there is no such folder, or it is one SM's set.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._source, self.root = _find(path)
        self._sets: dict[str, ArtifactSet] = {}

    def sms(self) -> list[str]:
        """SMs that have a folder with a manifest, sorted by name. A build's staging folders are not among them."""
        return _sms(self.root)

    def read(self, sm: str) -> ArtifactSet:
        """The set of one SM. Raises ArtifactError as `ArtifactSet.read` does."""
        if sm not in self._sets:
            self._sets[sm] = ArtifactSet.read(self.root / sm)
        return self._sets[sm]

    def forget(self, sm: str) -> None:
        """Read `sm`'s manifest anew next time: the folder may have been rebuilt since."""
        self._sets.pop(sm, None)

    def candidates(self, wanted: Wanted, capability: tuple[int, int]) -> Iterator[tuple[ArtifactSet, VariantRecord]]:
        """Variants that answer on a device of this compute capability, best SM first.

        Raises:
            ArtifactError: there is none; the message lists what exists.
        """
        found = False
        for sm in sm_rules.preference(self.sms(), capability):
            artifacts = self.read(sm)
            record = artifacts.find(wanted)
            if record is not None:
                found = True
                yield artifacts, record
        if not found:
            raise ArtifactError(self._missing(wanted, capability))

    def problem(self, sm: str = "sm_90a") -> str | None:
        """What keeps all kernels from loading: that there is no set; None where there is one.

        Args:
            sm: whose set to build.
        """
        if self.sms():
            return None
        mend = f"build them: {self._mend(sm)}{_or_correct(self._source)}"
        return f"{self._source} holds no artifacts: {self.root}; {mend}"

    def _mend(self, sm: str) -> str:
        return build_command(sm, self.root)

    def _missing(self, wanted: Wanted, capability: tuple[int, int]) -> str:
        usable, targets = (sm_rules.preference(sms, capability) for sms in (self.sms(), SMS))
        if usable:
            names = sorted(name for sm in usable for name in self.read(sm).variants)
            has = f"{self.root} has for this device: {', '.join(names) or 'nothing'}"
            return f"no artifact for {wanted}: {has}; build it: {self._mend(usable[0])}"
        nothing = self.problem(targets[0]) if targets else None
        if nothing:
            return f"no artifact for {wanted}: {nothing}"
        has = f"{self.root} has artifacts for {', '.join(self.sms()) or 'no SM'}"
        why = f"none of which runs on compute capability {capability[0]}.{capability[1]}"
        remedy = f"build it: {self._mend(targets[0])}" if targets else f"no target of the build does ({', '.join(SMS)})"
        return f"no artifact for {wanted}: {has}, {why}; {remedy}"


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere artifacts are looked for.

    Attributes:
        source: what names it: "the path given", "$QSA_CUTE_ARTIFACTS", "the package" or "the checkout".
        path: the folder; None where the source names none.
        state: what is there, such as "sm_80, sm_90a", "no artifacts", "one SM's set" or "not a folder".
    """

    source: str
    path: Path | None
    state: str


def places(path: str | os.PathLike[str] | None = None) -> list[Place]:
    """Every place where artifacts are looked for, in order, and what is there. The first that is set counts; of the
    package and the checkout, the first that holds artifacts."""
    named = os.environ.get(ENVIRONMENT)
    found = [] if path is None else [_look("the path given", Path(path))]
    found.append(_look(f"${ENVIRONMENT}", Path(named) if named else None))
    found.append(_look("the package", _PACKAGE / "artifacts"))
    found.append(_look("the checkout", _PACKAGE.parent / "artifacts"))
    return found


def _look(source: str, path: Path | None) -> Place:
    if path is None:
        return Place(source, None, "not set")
    if not path.is_dir():
        return Place(source, path, "a file" if path.exists() else "not a folder")
    return Place(source, path, "one SM's set" if _is_set(path) else ", ".join(_sms(path)) or "no artifacts")


def _is_set(path: Path) -> bool:
    """Whether a folder is the set of one SM, which lies in the artifact folder."""
    return (path / MANIFEST).is_file()


def _sms(root: Path) -> list[str]:
    names = (path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    return sorted(name for name in names if sm_rules.parse(name))


def find_root(path: str | os.PathLike[str] | None = None) -> Path:
    """The artifact folder: `path`, else $QSA_CUTE_ARTIFACTS, else the package's own, else the checkout's.

    A path that was given, by argument or environment, is the only one looked at.

    Raises:
        ArtifactError: it does not exist or is one SM's set; the message names every place looked at.
    """
    return _find(path)[1]


def _find(path: str | os.PathLike[str] | None) -> tuple[str, Path]:
    """What names the artifact folder, and the folder."""
    given = Path(path) if path is not None else None
    source = "the path given"
    if given is None and os.environ.get(ENVIRONMENT):
        given, source = Path(os.environ[ENVIRONMENT]), f"${ENVIRONMENT}"
    if given is not None:
        if given.is_dir() and not _is_set(given):
            return source, given.resolve()
        raise ArtifactError(_no_root(source, given))
    looked = {"the package": _PACKAGE / "artifacts", "the checkout": _PACKAGE.parent / "artifacts"}
    for source, place in looked.items():
        if next(place.glob(f"*/{MANIFEST}"), None) is not None:
            return source, place
    where = ", ".join(map(str, looked.values()))
    raise ArtifactError(
        f"no artifacts: ${ENVIRONMENT} is not set, none in {where}; build them: {build_command('sm_90a')}"
    )


def _no_root(source: str, given: Path) -> str:
    """Why a path that was given is no artifact folder, and what to do."""
    if _is_set(given):
        return f"{source} is one SM's set: {given}; name its parent, {given.resolve().parent}"
    if given.exists():
        return f"{source} is a file: {given}; name a folder of artifacts{_or_correct(source)}"
    mend = build_command("sm_90a", given)
    return f"{source} is not a folder: {given}; build one: {mend}{_or_correct(source)}"


def _or_correct(source: str) -> str:
    """The other remedy where the environment names the place."""
    return f", or unset or correct {ENVIRONMENT}" if source == f"${ENVIRONMENT}" else ""
