"""Reads a cubin's ELF: what the compiler says about the one kernel inside. Pure Python, no CUDA tool."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from qsa_cute.errors import ArtifactError

# Attributes of the .nv.info sections, as `cuobjdump -elf` names them.
EIATTR_FRAME_SIZE = 0x11
EIATTR_KPARAM_INFO = 0x17
EIATTR_REGCOUNT = 0x2F
EIFMT_SVAL = 0x04  # the one format that carries a payload longer than two bytes

# From sm_90 up ptxas counts the block's 1 KiB of system shared memory in the kernel's own section; the opt-in
# limits of `variants.SMEM_OPTIN_KIB` are without it.
SYSTEM_SMEM_BYTES = 1024
SYSTEM_SMEM_SYMBOL = b".nv.reservedSmem"


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    Attributes:
        symbol: its name in the ELF.
        registers: per thread.
        stack_bytes: per thread, the largest frame in the cubin: spills and local arrays.
        static_smem_bytes: per block, without the system's own.
        params: (offset, size) in bytes, in the order of the signature.
        ptxas_version: e.g. "13.4.59".
    """

    symbol: str
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    params: tuple[tuple[int, int], ...]
    ptxas_version: str


def read_cubin(data: bytes) -> Cubin:
    """Parse a cubin that holds exactly one kernel.

    Raises:
        ArtifactError: not a 64-bit ELF, cut short, or not one kernel.
    """
    try:
        return _read(data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"the cubin ({len(data)} bytes) is cut short or damaged: {error}; build it again"
        ) from error


def _read(data: bytes) -> Cubin:
    if data[:5] != b"\x7fELF\x02":
        raise ArtifactError(f"not a cubin: it starts with {data[:5]!r}, a 64-bit ELF starts with b'\\x7fELF\\x02'")
    sections = dict(_sections(data))
    symbols = [name.removeprefix(".nv.info.") for name in sections if name.startswith(".nv.info.")]
    if len(symbols) != 1:
        raise ArtifactError(f"a cubin holds one kernel, this one {len(symbols)}: {', '.join(symbols) or 'none'}")
    symbol = symbols[0]
    common = list(_attributes(sections[".nv.info"][0]))
    own = _attributes(sections[f".nv.info.{symbol}"][0])
    registers = [struct.unpack("<II", payload)[1] for code, payload in common if code == EIATTR_REGCOUNT]
    frames = [struct.unpack("<II", payload)[1] for code, payload in common if code == EIATTR_FRAME_SIZE]
    _, shared = sections.get(f".nv.shared.{symbol}", (b"", 0))
    if SYSTEM_SMEM_SYMBOL in data:
        shared = max(0, shared - SYSTEM_SMEM_BYTES)
    version = re.search(rb"release [\d.]+, V([\d.]+)", sections.get(".note.nv.tkinfo", (b"", 0))[0])
    return Cubin(
        symbol=symbol,
        registers=max(registers),
        stack_bytes=max(frames, default=0),
        static_smem_bytes=shared,
        params=tuple(_params(payload for code, payload in own if code == EIATTR_KPARAM_INFO)),
        ptxas_version=version.group(1).decode() if version else "unknown",
    )


def _sections(data: bytes) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """(name, (contents, size)); contents are empty where the ELF holds none (.nv.shared)."""
    segments, table = struct.unpack_from("<QQ", data, 0x20)
    segment_size, segment_count, entry_size, count, names_index = struct.unpack_from("<HHHHH", data, 0x36)
    if segments + segment_size * segment_count > len(data):
        raise IndexError(f"its segment table ends at byte {segments + segment_size * segment_count}")
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name_offset, kind, _flags, _address, offset, size in headers:
        start = names + name_offset
        name = data[start : data.index(b"\0", start)].decode()
        no_bits = kind == 8
        if not no_bits and offset + size > len(data):
            raise IndexError(f"section {name} ends at byte {offset + size}")
        yield name, (b"" if no_bits else data[offset : offset + size], size)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) records of a .nv.info section."""
    at = 0
    while at < len(info):
        form, code, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == EIFMT_SVAL:
            yield code, info[at : at + length]
            at += length
        else:
            yield code, struct.pack("<H", length)


def _params(payloads: Iterator[bytes]) -> list[tuple[int, int]]:
    found = []
    for payload in payloads:
        _index, ordinal, offset, flags = struct.unpack("<IHHI", payload)
        found.append((ordinal, offset, flags >> 18))
    return [(offset, size) for _ordinal, offset, size in sorted(found)]
