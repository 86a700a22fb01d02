"""The registry: names that say everything, filters that refuse what does not exist."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsa_cute import geometry, variants
from qsa_cute.errors import UnsupportedError
from qsa_cute.variants import DTYPES, HALF_DTYPES, KERNELS, SMS, TAGS, Variant

EVERY = variants.variants()

baked_constants = st.dictionaries(st.sampled_from(sorted(TAGS)), st.integers(0, 10**6)).map(variants.order_baked)
any_variant = st.builds(
    Variant,
    st.sampled_from(sorted(KERNELS)),
    st.sampled_from(geometry.SUPPORTED_HEAD_DIMS),
    st.sampled_from(DTYPES),
    st.sampled_from(SMS),
    baked_constants,
)


def test_names_are_unique() -> None:
    assert len({variant.name for variant in EVERY}) == len(EVERY)


@given(any_variant, any_variant)
def test_a_name_is_one_variant(one: Variant, other: Variant) -> None:
    assert (one.name == other.name) == (one == other)


@pytest.mark.parametrize("variant", variants.variants(["sm_90a"]), ids=lambda variant: variant.name)
def test_every_part_changes_the_name(variant: Variant) -> None:
    for i, (key, value) in enumerate(variant.baked):
        other = replace(variant, baked=(*variant.baked[:i], (key, value + 1), *variant.baked[i + 1 :]))
        assert other.name != variant.name
    for change in ({"head_dim": 64}, {"dtype": "other"}, {"sm": "sm_80"}, {"kernel": "other"}):
        assert replace(variant, **change).name != variant.name


@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
def test_names_are_symbols_that_people_can_grep(variant: Variant) -> None:
    assert re.fullmatch(rf"qsa_{variant.kernel}_d\d+_(bf16|fp16|fp8_e4m3)(_[a-z]+\d+)*_sm\d+a?", variant.name)


def test_a_baked_constant_without_a_tag_is_refused() -> None:
    with pytest.raises(ValueError, match="nameless"):
        variants.order_baked({"nameless": 1})


def test_tags_are_distinct() -> None:
    assert len(set(TAGS.values())) == len(TAGS)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_the_code_of_every_kernel_exists(kernel: variants.Kernel) -> None:
    module, _, class_name = kernel.entry.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"class {class_name}" in Path(spec.origin).read_text()


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("head_dim", geometry.SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_sm_has_prefill_and_decode(sm: str, head_dim: int, dtype: str) -> None:
    kernels = {variant.kernel for variant in variants.variants([sm], "*", [head_dim], [dtype])}
    assert {"sparse_prefill", "sparse_decode"} <= kernels


def test_filters_narrow() -> None:
    (found,) = variants.variants(["sm_90a"], "sparse_decode", [128], ["fp16"], max_splits=16)
    assert (found.kernel, found.head_dim, found.dtype, found.sm) == ("sparse_decode", 128, "fp16", "sm_90a")
    assert dict(found.baked)["max_splits"] == 16
    assert "_s16_" in found.name


def test_max_splits_leaves_kernels_without_splits() -> None:
    assert variants.variants(["sm_80"], "sparse_prefill", max_splits=16) == variants.variants(
        ["sm_80"], "sparse_prefill"
    )


@pytest.mark.parametrize(
    ("asked", "listed"),
    [
        ({"sms": ["sm_91"]}, SMS),
        ({"kernels": "nope*"}, tuple(KERNELS)),
        ({"head_dims": [64]}, geometry.SUPPORTED_HEAD_DIMS),
        ({"dtypes": ["fp64"]}, DTYPES),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(asked: dict, listed: tuple) -> None:
    with pytest.raises(UnsupportedError, match=", ".join(map(str, listed))):
        variants.variants(**asked)


@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
def test_registered(variant: Variant) -> None:
    assert variants.is_registered(variant)
    assert not variants.is_registered(replace(variant, kernel="other"))
    assert not variants.is_registered(replace(variant, sm="sm_70"))
    assert not variants.is_registered(replace(variant, baked=(*variant.baked, ("warps", 100))))
    for key, value in variant.baked[:1]:
        assert not variants.is_registered(replace(variant, baked=((key, value + 100), *variant.baked[1:])))


def test_another_number_of_splits_is_registered() -> None:
    assert all(map(variants.is_registered, variants.variants(["sm_90a"], "sparse_decode", max_splits=32)))
