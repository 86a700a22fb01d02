"""What a build writes and a load expects: the version numbers, the scalar kinds, the manifest's head, and the command
that makes a set again. One home for both sides.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qsa_cute.errors import ArtifactError

CHECKOUT = Path(__file__).resolve().parents[1]  # of an installed package: the folder that it is installed in

# Shape of manifest.json. A change that an older reader would misread raises it.
SCHEMA = 1

# What a launch hands a kernel: parameter meanings, workspace layouts, grids. A load refuses any other number.
ABI = 1

MANIFEST = "manifest.json"

# Its keys. No other is read: a key that was altered must not look like one that is not there.
MANIFEST_KEYS = frozenset({"schema", "abi", "sm", "dsl_version", "ptxas_version", "source_digest", "variants"})
CHECKSUM = "checksum"  # beside them, of all the rest; manifests of earlier builds have none

# Kinds of kernel parameters and their `struct` codes (little endian, natural alignment = size).
KINDS: Mapping[str, str] = MappingProxyType({"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"})


def checksum(manifest: Mapping[str, Any]) -> str:
    """sha256 of a manifest's contents without its checksum, however they are spaced."""
    rest = {key: value for key, value in manifest.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def altered(manifest: Mapping[str, Any]) -> str:
    """What tells that a manifest is not as it was written; "" for nothing."""
    unknown = sorted(manifest.keys() - MANIFEST_KEYS - {CHECKSUM})
    if unknown:
        return f"has keys that no manifest has: {', '.join(unknown)}"
    said = manifest.get(CHECKSUM)
    return "" if said in (None, checksum(manifest)) else "was altered: its contents do not have the checksum it says"


def output_option(root: str | os.PathLike[str] | None) -> str:
    """What a command needs to work on the artifact folder `root`; "" where it does so by itself."""
    if root is None or Path(root).resolve() == (CHECKOUT / "artifacts").resolve():
        return ""
    return f" --output {shlex.quote(str(root))}"


def build_command(sm: str, root: str | os.PathLike[str] | None = None, force: bool = False) -> str:
    """The command that makes the set of `sm`, as every message quotes it.

    Args:
        root: the artifact folder; None and the checkout's own are where a build writes by itself.
        force: needed only where a build would take the set for sound.
    """
    command = f"python build_cutedsl.py build --gpu-arch {sm}{output_option(root)}{' --force' if force else ''}"
    if (CHECKOUT / "build_cutedsl.py").exists():
        return command
    return f"{command}, in a checkout of qsa-cute; artifacts that came in a wheel: install that wheel again"


def bad_manifest(folder: Path, what: str) -> ArtifactError:
    """The one sentence about a manifest that is not sound. A plain build makes such a set anew, whatever is wrong."""
    mend = build_command(folder.name, folder.parent)
    return ArtifactError(f"manifest {folder / MANIFEST} {what}; rebuild it: {mend}")


def read_head(folder: Path) -> dict[str, Any] | None:
    """The manifest of an SM's folder, its head found right; None where there is none.

    Raises:
        ArtifactError: unreadable, altered, of another schema or ABI, or of another SM than its folder's.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise bad_manifest(folder, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise bad_manifest(folder, f"is not JSON ({error})") from error
    except RecursionError as error:
        raise bad_manifest(folder, "is not JSON (nested without end)") from error
    if not isinstance(manifest, dict):
        raise bad_manifest(folder, "is not a JSON object")
    for key, mine in (("schema", SCHEMA), ("abi", ABI)):
        if manifest.get(key) != mine:
            raise bad_manifest(folder, f"has {key} {manifest.get(key)!r}, this qsa_cute reads {key} {mine}")
    what = altered(manifest)
    if what:
        raise bad_manifest(folder, what)
    if manifest.get("sm") != folder.name:
        raise bad_manifest(folder, f"is for {manifest.get('sm')!r} but lies in a folder named {folder.name!r}")
    if not isinstance(manifest.get("variants"), dict):
        raise bad_manifest(folder, "has no table of variants")
    return manifest
