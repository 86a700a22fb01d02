"""Reading cubins and judging them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest
from conftest import SM

from qsa_cute.aot import manifest as mf
from qsa_cute.aot import sass
from qsa_cute.aot.cubin import Cubin, read_cubin
from qsa_cute.errors import ArtifactError
from qsa_cute.kernels.attention import paged_attention_tma, sparse_decode_tma
from qsa_cute.variants import Kernel


@pytest.fixture
def file(real_build: Path) -> Path:
    return next((real_build / SM).glob("*.cubin"))


def test_the_elf_agrees_with_cuobjdump(file: Path) -> None:
    """NVIDIA's own reader is the second opinion on the resources."""
    said = subprocess.run(
        [sass.cuobjdump(), "--dump-resource-usage", file], capture_output=True, text=True, check=True
    ).stdout
    cubin = read_cubin(file.read_bytes())
    function = re.search(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", said)
    assert function is not None
    assert function.groups() == (cubin.symbol, str(cubin.registers), str(cubin.stack_bytes))


def test_a_cut_cubin_is_refused(file: Path) -> None:
    data = file.read_bytes()
    for length in (0, 4, 60, 200, len(data) // 2, len(data) - 1):
        with pytest.raises(ArtifactError, match=r"not a cubin|cut short or damaged"):
            read_cubin(data[:length])


def test_another_files_bytes_are_refused() -> None:
    with pytest.raises(ArtifactError, match="not a cubin"):
        read_cubin(b"#!/bin/sh\n" * 100)


def test_opcodes(file: Path) -> None:
    counts = sass.opcodes(file)
    assert counts["EXIT"] >= 1
    assert counts["STG"] == 1
    assert sass.tensor_core(counts) == {}
    assert sass.local_memory(counts) == 0


def test_opcodes_of_no_cubin(tmp_path: Path) -> None:
    (tmp_path / "x.cubin").write_text("nothing")
    with pytest.raises(ArtifactError, match="no SASS"):
        sass.opcodes(tmp_path / "x.cubin")


@pytest.mark.parametrize(
    ("opcode", "is_one"),
    [("HMMA", True), ("HGMMA", True), ("QMMA", True), ("UTCHMMA", True), ("FFMA", False), ("IMAD", False)],
)
def test_which_opcodes_are_tensor_core(opcode: str, is_one: bool) -> None:
    assert (opcode in sass.tensor_core(Counter({opcode: 1}))) is is_one


def test_without_the_disassembler_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "WHEEL", "no-such-distribution")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ArtifactError, match="pip install"):
        sass.cuobjdump()


ENTRY = mf.Entry(
    kernel="toy",
    head_dim=128,
    dtype="bf16",
    baked={},
    file="",
    sha256="",
    size=1,
    symbol="",
    threads=32,
    smem_bytes=99 * 1024,
    static_smem_bytes=0,
    registers=255,
    spill_bytes=0,
    params=[{"name": "p", "kind": "ptr", "offset": 0, "size": 8}],
    param_bytes=8,
    tensor_core={"HMMA": 4},
    digest="",
)
SOUND = Cubin(symbol="", registers=255, stack_bytes=0, static_smem_bytes=0, params=((0, 8),), ptxas_version="")


class TestDefects:
    """Each reason to refuse a variant, alone, on an otherwise sound one."""

    @pytest.fixture(autouse=True)
    def toy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mf, "KERNELS", MappingProxyType({"toy": Kernel("toy", "", ())}))

    def check(self, cubin: Cubin = SOUND, counts: Counter[str] | None = None, **changed: object) -> list[str]:
        return mf.defects({**ENTRY, **changed}, "sm_86", cubin, counts or Counter())

    def test_none(self) -> None:
        assert self.check() == []

    def test_spills(self) -> None:
        (stack,) = self.check(spill_bytes=16)
        assert "16 bytes of stack" in stack
        (accesses,) = self.check(counts=Counter({"STL": 2, "LDL": 3}))
        assert "5 accesses" in accesses

    def test_shared_memory(self) -> None:
        (found,) = self.check(static_smem_bytes=16)
        assert str(99 * 1024 + 16) in found
        assert str(99 * 1024) in found

    def test_tensor_core(self) -> None:
        (found,) = self.check(tensor_core={"IMMA": 1})
        assert "no HMMA" in found
        assert "IMMA" in found

    def test_parameters(self) -> None:
        (found,) = self.check(cubin=replace(SOUND, params=((0, 4),)))
        assert "((0, 8),)" in found
        assert "((0, 4),)" in found


@pytest.mark.parametrize(
    ("module", "name"),
    [(sparse_decode_tma, "kv_map_0"), (paged_attention_tma, "k_map_0"), (paged_attention_tma, "v_map_0")],
)
def test_a_tensor_map_that_is_used_where_it_stands_lies_at_a_multiple_of_64_bytes(
    module: ModuleType, name: str
) -> None:
    """Of the constant bank, where parameters begin at 0x210 on SM90."""
    words = ({"name": name, "kind": kind} for param in module.PARAMS for name, kind in param.words())
    (first,) = (param for param in mf.layout(words) if param["name"] == name)
    assert (0x210 + first["offset"]) % 64 == 0


def test_layout_aligns_each_to_its_size() -> None:
    kinds = ["i32", "ptr", "f32", "i32", "i64", "f32"]
    table = mf.layout({"name": f"p{i}", "kind": kind} for i, kind in enumerate(kinds))
    assert [(param["offset"], param["size"]) for param in table] == [(0, 4), (8, 8), (16, 4), (20, 4), (24, 8), (32, 4)]
