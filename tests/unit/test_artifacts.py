"""Finding, reading and checking artifacts; every refusal says what was wanted, what exists and what mends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runtime_fakes import PARAMS, write_set

from qsa_cute.abi import CHECKOUT, build_command
from qsa_cute.errors import ArgumentError, ArtifactError
from qsa_cute.runtime import artifacts, sm
from qsa_cute.runtime.artifacts import Store, Wanted

DECODE = Wanted("sparse_decode", 256, "bf16")
HOPPER = (9, 0)
MEND = "python build_cutedsl.py build --gpu-arch sm_90a --output"


def edit(root: Path, change, sm_name: str = "sm_90a") -> None:
    path = root / sm_name / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def refusal(root: Path, wanted: Wanted = DECODE, capability: tuple[int, int] = HOPPER) -> str:
    """The message of the ArtifactError that using a variant raises."""
    with pytest.raises(ArtifactError) as caught:
        cubins(root, wanted, capability)
    return str(caught.value)


def cubins(root: Path, wanted: Wanted = DECODE, capability: tuple[int, int] = HOPPER) -> list[bytes]:
    return [found.cubin(record) for found, record in Store(root).candidates(wanted, capability)]


class TestFind:
    def test_the_argument_comes_before_the_environment(self, tmp_path, monkeypatch):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(tmp_path / "b"))
        assert artifacts.find_root(tmp_path / "a") == (tmp_path / "a").resolve()
        assert artifacts.find_root() == (tmp_path / "b").resolve()

    def test_the_package_comes_before_the_checkout(self, tmp_path, monkeypatch):
        package = tmp_path / "qsa_cute"
        monkeypatch.delenv(artifacts.ENVIRONMENT, raising=False)
        monkeypatch.setattr(artifacts, "_PACKAGE", package)
        write_set(tmp_path / "artifacts")
        assert artifacts.find_root() == tmp_path / "artifacts"
        write_set(package / "artifacts")
        assert artifacts.find_root() == package / "artifacts"

    def test_a_set_path_that_does_not_exist_is_not_passed_over(self, tmp_path, monkeypatch):
        with pytest.raises(ArtifactError, match=r"the path given is not a folder: .*absent") as caught:
            artifacts.find_root(tmp_path / "absent")
        assert MEND in str(caught.value)
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(tmp_path / "absent"))
        with pytest.raises(ArtifactError, match=r"\$QSA_CUTE_ARTIFACTS is not a folder") as caught:
            artifacts.find_root()
        assert str(caught.value).endswith(f"{MEND} {tmp_path}/absent, or unset or correct QSA_CUTE_ARTIFACTS")

    def test_one_sms_own_set_is_not_a_place_of_sets(self, tmp_path, monkeypatch):
        """The usual slip."""
        write_set(tmp_path)
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(tmp_path / "sm_90a"))
        with pytest.raises(ArtifactError) as caught:
            Store()
        said = f"$QSA_CUTE_ARTIFACTS is one SM's set: {tmp_path}/sm_90a; name its parent, {tmp_path}"
        assert str(caught.value) == said

    def test_a_file(self, tmp_path, monkeypatch):
        (tmp_path / "x.whl").write_bytes(b"")
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(tmp_path / "x.whl"))
        with pytest.raises(ArtifactError, match=r"\$QSA_CUTE_ARTIFACTS is a file: .*unset or correct QSA_CUTE"):
            Store()

    def test_an_empty_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv(artifacts.ENVIRONMENT, str(tmp_path))
        store = Store()
        assert store.problem().startswith(f"$QSA_CUTE_ARTIFACTS holds no artifacts: {tmp_path}; build them: {MEND}")
        with pytest.raises(ArtifactError, match=r"--gpu-arch sm_80 .*, or unset or correct QSA_CUTE_ARTIFACTS"):
            next(store.candidates(DECODE, (8, 0)))
        write_set(tmp_path)
        assert store.problem() is None

    def test_the_checkouts_own_artifacts_need_no_output(self, tmp_path):
        assert "--output" not in build_command("sm_80")
        assert "--output" not in build_command("sm_80", CHECKOUT / "artifacts")
        assert "--output 'a b' --force" in build_command("sm_80", "a b", force=True)

    def test_nothing_anywhere_names_every_place(self, tmp_path, monkeypatch):
        monkeypatch.delenv(artifacts.ENVIRONMENT, raising=False)
        monkeypatch.setattr(artifacts, "_PACKAGE", tmp_path / "qsa_cute")
        with pytest.raises(ArtifactError) as caught:
            artifacts.find_root()
        mend = MEND.removesuffix(" --output")
        for part in ("QSA_CUTE_ARTIFACTS", str(tmp_path / "qsa_cute/artifacts"), str(tmp_path / "artifacts"), mend):
            assert part in str(caught.value)


class TestSmRules:
    @pytest.mark.parametrize(
        ("target", "runs", "not_on"),
        [
            ("sm_80", [(8, 0), (8, 6), (8, 9)], [(8, 7), (9, 0), (7, 5)]),
            ("sm_86", [(8, 6), (8, 9)], [(8, 0), (8, 7)]),
            ("sm_87", [(8, 7)], [(8, 9), (8, 6)]),
            ("sm_90a", [(9, 0)], [(10, 0), (8, 9)]),
            ("sm_100a", [(10, 0)], [(10, 3), (12, 0)]),
            ("sm_120a", [(12, 0)], [(12, 1)]),
            ("hopper", [], [(9, 0)]),
        ],
    )
    def test_runs_on(self, target, runs, not_on):
        assert all(sm.runs_on(target, capability) for capability in runs)
        assert not any(sm.runs_on(target, capability) for capability in not_on)

    def test_preference(self):
        assert sm.preference(["sm_80", "sm_90", "sm_90a"], (9, 0)) == ["sm_90a", "sm_90"]
        assert sm.preference(["sm_80", "sm_86", "sm_89"], (8, 9)) == ["sm_89", "sm_86", "sm_80"]
        assert sm.preference(["sm_80"], (9, 0)) == []


class TestSelect:
    def test_the_best_sm_that_has_it_comes_first(self, tmp_path):
        write_set(tmp_path, "sm_80")
        write_set(tmp_path, "sm_86")
        write_set(tmp_path, "sm_90a")
        found = [record.name for _, record in Store(tmp_path).candidates(DECODE, (8, 9))]
        assert found == ["qsa_sparse_decode_d256_bf16_s8_sm86", "qsa_sparse_decode_d256_bf16_s8_sm80"]

    def test_baked_constants_choose(self, tmp_path):
        write_set(tmp_path, variants={"s8": {}, "s16": {"baked": {"max_splits": 16}}})
        store = Store(tmp_path)
        wanted = Wanted.of(("sparse_decode", 256, "bf16", {"max_splits": 16}))
        assert [record.name for _, record in store.candidates(wanted, HOPPER)] == ["s16"]
        with pytest.raises(ArgumentError, match=r"ambiguous.*s16, s8.*baked"):
            list(store.candidates(DECODE, HOPPER))

    def test_a_missing_variant_lists_what_exists(self, tmp_path):
        name = write_set(tmp_path)
        message = refusal(tmp_path, Wanted("sparse_decode", 128, "fp16"))
        assert "no artifact for sparse_decode d128 fp16" in message
        assert name in message
        assert message.endswith(f"{MEND} {tmp_path}")

    def test_a_foreign_sm_names_the_sm_to_build(self, tmp_path):
        write_set(tmp_path)
        message = refusal(tmp_path, capability=(8, 0))
        assert "has artifacts for sm_90a, none of which runs on compute capability 8.0" in message
        assert "--gpu-arch sm_80" in message

    def test_a_device_without_a_target_is_told_so(self, tmp_path):
        write_set(tmp_path)
        assert "no target of the build does (sm_80, " in refusal(tmp_path, capability=(7, 5))

    def test_an_empty_store(self, tmp_path):
        assert f"the path given holds no artifacts: {tmp_path}; build them: {MEND} {tmp_path}" in refusal(tmp_path)

    def test_staging_folders_of_a_build_are_not_artifacts(self, tmp_path):
        write_set(tmp_path, ".old-sm_90a")
        assert Store(tmp_path).sms() == []

    @pytest.mark.parametrize("key", [None, "sparse_decode", ("sparse_decode",), 3])
    def test_a_key_of_another_shape(self, key):
        with pytest.raises(ArgumentError, match="asked for as"):
            Wanted.of(key)


class TestManifest:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda m: m.update(schema=2), "has schema 2, this qsa_cute reads schema 1"),
            (lambda m: m.update(abi=7), "has abi 7, this qsa_cute reads abi 1"),
            (lambda m: m.pop("abi"), "has abi None"),
            (lambda m: m.update(sm="sm_80"), "is for 'sm_80' but lies in a folder named 'sm_90a'"),
            (lambda m: m.update(variants=[]), "has no table of variants"),
        ],
    )
    def test_the_header(self, tmp_path, change, says):
        write_set(tmp_path)
        edit(tmp_path, change)
        message = refusal(tmp_path)
        assert str(tmp_path / "sm_90a" / "manifest.json") in message
        assert says in message
        assert MEND in message

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"file": "../secret.cubin"}, "leaves its folder"),
            ({"file": "/etc/passwd"}, "leaves its folder"),
            ({"file": "sub/x.cubin"}, "leaves its folder"),
            ({"file": ".."}, "cannot be read"),
            ({"size": "12"}, "has size = '12'"),
            ({"size": -1}, "has size = -1"),
            ({"threads": True}, "has threads = True"),
            ({"symbol": None}, "has symbol = None"),
            ({"params": {}}, "has params = {}"),
            ({"params": [{**PARAMS[0], "kind": "i128"}]}, "cannot be packed"),
            ({"params": [{**PARAMS[0], "size": 4}]}, "cannot be packed"),
            ({"params": [{**PARAMS[0], "name": "a.b"}]}, "cannot be packed"),
            ({"params": [{**PARAMS[0], "offset": 4}]}, "overlapping or unaligned"),
            ({"params": [PARAMS[0], PARAMS[0]]}, "overlapping or unaligned"),
            ({"param_bytes": 24}, "24 parameter bytes, its parameters need 28"),
        ],
    )
    def test_a_variant(self, tmp_path, change, says):
        name = write_set(tmp_path)
        edit(tmp_path, lambda manifest: manifest["variants"][name].update(change))
        message = refusal(tmp_path)
        assert says in message
        assert MEND in message

    @pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', b"\xff\xfe\x00".decode("latin1")])
    def test_what_is_no_json_object(self, tmp_path, text):
        write_set(tmp_path)
        (tmp_path / "sm_90a" / "manifest.json").write_text(text)
        message = refusal(tmp_path)
        assert "is not" in message
        assert MEND in message

    def test_oldest_driver(self, tmp_path):
        write_set(tmp_path)
        assert Store(tmp_path).read("sm_90a").min_driver == 13000


class TestCubin:
    def test_sound(self, tmp_path):
        name = write_set(tmp_path)
        assert cubins(tmp_path) == [f"cubin of {name}".encode()]

    def test_truncated(self, tmp_path):
        path = tmp_path / "sm_90a" / f"{write_set(tmp_path)}.cubin"
        path.write_bytes(path.read_bytes()[:-3])
        message = refusal(tmp_path)
        assert f"{path} has {path.stat().st_size} bytes where its manifest says" in message
        assert MEND in message

    def test_altered(self, tmp_path):
        path = tmp_path / "sm_90a" / f"{write_set(tmp_path)}.cubin"
        data = bytearray(path.read_bytes())
        data[4] ^= 1
        path.write_bytes(data)
        message = refusal(tmp_path)
        assert f"{path} has sha256" in message
        assert message.endswith(f"{MEND} {tmp_path}")  # a plain build sees what is damaged

    def test_absent(self, tmp_path):
        path = tmp_path / "sm_90a" / f"{write_set(tmp_path)}.cubin"
        path.unlink()
        assert f"{path} cannot be read (No such file or directory)" in refusal(tmp_path)
