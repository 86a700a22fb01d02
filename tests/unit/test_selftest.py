"""The self-test's own arithmetic against the reference, and that it finds out kernels that are wrong."""

from __future__ import annotations

import itertools
import struct
from array import array

import pytest
import selftest_host as host
import torch
from selftest_host import TYPES, HostDriver

from qsa_cute import selftest, union_layout
from qsa_cute.errors import DriverError
from qsa_cute.geometry import INDEX_WIDTH
from qsa_cute.reference import attention, indexer, kpool, metrale, paged, paged_select
from qsa_cute.runners import SparseDecodeRunner, SparsePrefillRunner
from qsa_cute.runners.kpool import DecodeUpdate
from qsa_cute.runners.paged_attention import PagedAttentionRunner
from qsa_cute.runtime import sm as sm_rules
from qsa_cute.selftest import attention as sparse
from qsa_cute.selftest import indexer as index_case
from qsa_cute.selftest import kpool as kpool_case
from qsa_cute.selftest import metrale as metrale_case
from qsa_cute.selftest import paged as paged_case
from qsa_cute.selftest import paged_select as select_case
from qsa_cute.selftest import values
from qsa_cute.variants import SMS, variants

each = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
each_type = pytest.mark.parametrize("dtype", TYPES)


def tensor(bits, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bits.tobytes()), dtype=TYPES[dtype])


def ints(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# Values.


@each_type
def test_numbers(dtype) -> None:
    bits = values.element_bits(values.random.Random(1), dtype, 5000)
    found = tensor(bits, dtype).float()
    assert values.floats(bits, dtype) == found.tolist()
    assert found.abs().min() >= 0.5
    assert found.abs().max() < 2
    assert found.unique().numel() > 30
    some = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    some[::9] *= 2.0**-9
    assert [values.rounded(value, dtype) for value in some.tolist()] == some.to(TYPES[dtype]).float().tolist()


def test_every_e4m3() -> None:
    every = array("B", range(256))
    found, want = torch.tensor(values.floats(every, values.FP8)), tensor(every, values.FP8).float()
    assert torch.equal(found.nan_to_num(nan=999), want.nan_to_num(nan=999))
    ties = (want[:126] + want[1:127]) / 2
    assert [values.rounded(value, values.FP8) for value in ties.tolist()] == ties.to(TYPES["fp8_e4m3"]).float().tolist()
    assert values.rounded(1e9, values.FP8) == 448


def test_wrong_values() -> None:
    want = [1.0, -values.math.inf, 3.0]
    assert values.wrong_values(want, want, 0.0) == ""
    assert values.wrong_values([1.1, want[1], 3.0], want, 0.2) == ""
    assert "element 2 is 4.0" in values.wrong_values([1.1, want[1], 4.0], want, 0.2)
    for at, wrong in itertools.product(range(3), (values.math.nan, values.math.inf)):
        found = [*want]
        found[at] = wrong
        assert f"element {at} is {wrong}" in values.wrong_values(found, want, 9.0)
    assert "element 1 is 5.0" in values.wrong_values([1.0, 5.0, 3.0], want, 9.0)


def test_wrong_ids() -> None:
    scores = [float(i) for i in range(8)]
    assert values.wrong_ids([3, 4, 5, 6, 7], scores, 0.0) == ""
    assert values.wrong_ids([2, 4, 5, 6, 7], scores, 1.0) == ""
    assert "not the best" in values.wrong_ids([2, 4, 5, 6, 7], scores, 0.0)
    assert "not the best" in values.wrong_ids([1, 2, 3, 4, 5], scores, 1.0)
    assert values.wrong_ids([0, 1, -1, -1], [1.0, 2.0], 0.0) == ""
    assert values.wrong_ids([-1, -1], [], 0.0) == ""
    for wrong in ([4, 3, 5, 6, 7], [3, 3, 5, 6, 7], [3, 4, 5, 6, 8], [-1, 4, 5, 6, 7]):
        assert "ascending" in values.wrong_ids(wrong, scores, 0.0)
    assert "ascending" in values.wrong_ids([0, 1, 2], [1.0, 2.0], 0.0)


# Cases.


@each
@pytest.mark.parametrize("dim", [256, 128])
def test_attention(dtype, dim) -> None:
    q, k, v, want = sparse.inputs(dtype, dim, twice=True)
    k, v = (tensor(plane, dtype).view(1, -1, sparse.KV_HEADS, dim) for plane in (k, v))
    q = tensor(q, dtype).view(1, sparse.ROWS, -1, dim)
    lists = torch.tensor(sparse.lists(twice=True), dtype=torch.int32).view(1, sparse.ROWS, -1)
    context = torch.tensor([sparse.CONTEXT], dtype=torch.int32)
    found, _ = attention.sparse_prefill(q, k, v, lists, context, dim**-0.5, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(want, dtype=torch.float64), found.flatten(), rtol=1e-9, atol=1e-9)


@each
def test_indexer(dtype) -> None:
    case = index_case.IndexerCase(dtype)
    qk = tensor(case.qk, dtype).view(1, index_case.TOKENS + 1, -1)
    length = torch.tensor([index_case.TOKENS + 1], dtype=torch.int32)
    table = torch.frombuffer(bytearray(case.cos_sin().tobytes()), dtype=torch.float32).view(-1, 64)
    assert torch.equal(table, indexer.rope_table(index_case.TOKENS + 1))
    keys = indexer.compress_keys(qk, table, length, tensor(case.w_k, dtype), len(case.keys), dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(case.keys), keys[0].float(), rtol=1e-2, atol=1e-3)
    assert (torch.tensor(case.keys) == keys[0].float()).float().mean() > 0.999
    queries = indexer.prepare_queries(qk, table, length, tensor(case.w_q, dtype), dtype=torch.float64)
    rows = indexer.scores(queries, keys, length, dtype=torch.float64)[0]
    for row in (index_case.TOKENS - 1, index_case.TOKENS):
        found = torch.tensor(case.scores(row), dtype=torch.float64)
        torch.testing.assert_close(found, rows[row], rtol=1e-2, atol=1e-2)
        tokens = indexer.select_tokens(found.float()[None], torch.tensor([row]))[0].tolist()
        assert index_case.wrong_list(tokens, row, found.tolist()) == ""


def test_wrong_lists() -> None:
    scores = [float(i) for i in range(515)]  # the first three fall out
    right = [*range(12, 2061), -1, -1]
    assert index_case.wrong_list(right, 2060, scores) == ""
    for wrong, said in (
        ([*range(8, 12), *right[4:]], "not the best"),  # block 2 in the place of block 3
        ([*right[:4], *right[:4], *right[8:]], "not whole blocks"),  # twice the same
        ([*range(2060, 2064), *right[4:]], "does not see"),
        ([*right[:2048], -1, -1, -1], "not whole blocks"),  # no open block
        ([right[1], right[0], *right[2:]], "not whole blocks"),
        ([0] * INDEX_WIDTH, "not whole blocks"),
    ):
        assert said in index_case.wrong_list(wrong, 2060, scores)
    few = [*range(7), *[-1] * (INDEX_WIDTH - 7)]
    assert index_case.wrong_list(few, 6, None) == ""
    assert "not whole blocks" in index_case.wrong_list(few, 7, None)


@pytest.mark.parametrize("dtype", paged_case.SCALES)
@pytest.mark.parametrize("dim", [256, 128])
@pytest.mark.parametrize(
    ("given", "valid"), [(paged_case.ANY, [6, 10, 4, 0, 0]), (paged_case.SHARED, [27, 22, 17, 22, 24, 0])]
)
def test_paged_attention(dtype, dim, given, valid) -> None:
    q, gate, k, v, want = paged_case.inputs(dtype, dim, given)
    k, v = (tensor(plane, dtype).view(paged_case.PAGES, paged_case.PAGE, -1, dim) for plane in (k, v))
    q, gate = (tensor(plane, "bf16").view(len(given.lists), -1, dim) for plane in (q, gate))
    inputs = (q, k, v, ints(given.lists), ints(paged_case.TABLE), ints(given.requests))
    scales = dict(zip(("k_scale", "v_scale"), paged_case.SCALES[dtype], strict=True))
    found = paged.sparse_paged_attention(*inputs, gate=gate, dtype=torch.float64, **scales).flatten()
    want = torch.tensor(want, dtype=torch.float64)
    off = (found - want).abs()
    assert (off > 1e-9).sum() < len(off) / 500, "but where a rounding to bf16 goes the other way"
    assert (off <= want.abs() * 2**-7).all()
    assert [len(given.cells(row)) for row in range(len(valid))] == valid


def test_the_shared_case_is_one_that_a_union_can_say() -> None:
    """Else every tile goes to the row kernel, and the main kernel may do anything. As `paged_union/prepare.py` has it:
    rows of two requests in turn, no entry twice, few enough parts; and the two chunks, whole blocks and parts that the
    main kernel tells apart."""
    given, reach = paged_case.SHARED, paged_case.PAGE * len(paged_case.TABLE[0])
    assert list(given.requests) == sorted(given.requests)
    assert len(set(given.requests)) <= 2
    assert len(given.lists) * paged_case.Q_HEADS // paged_case.KV_HEADS <= union_layout.LEAST_PAIRS, "one tile"
    whole, parts = set(), set()
    for request, (*entries, count) in zip(given.requests, given.lists, strict=True):
        tokens = [token for token in entries[: max(0, count)] if 0 <= token < reach]
        assert len(tokens) == len(set(tokens))
        for i in range(0, len(entries), 4):
            four = [token for token in entries[i : min(i + 4, max(0, count))] if 0 <= token < reach]
            named = whole if len(four) == 4 and len({token // 4 for token in four}) == 1 else parts
            named |= {(request, token // 4) for token in four}
    assert parts
    assert len(parts) <= 80 // 4 < len(whole | parts), "more than a chunk of D = 256"
    assert whole - parts
    two_requests_mixed = paged_case.ANY.requests
    assert list(two_requests_mixed) != sorted(two_requests_mixed), "control: the other rows are no such case"


@pytest.mark.parametrize("dtype", select_case.BAND)
def test_paged_selection(dtype) -> None:
    q, cache, scores = select_case.inputs(dtype)
    q, cache = tensor(q, dtype).view(2, 4, 128), tensor(cache, dtype).view(-1, select_case.PAGE, 1, 128)
    visible = ints(select_case.VISIBLE)
    found = paged_select.scores(q, cache, ints([select_case.TABLE]), torch.zeros(2, dtype=torch.int64), visible)
    for row, count in enumerate(select_case.VISIBLE):
        want = torch.tensor(scores[row], dtype=torch.float64)
        torch.testing.assert_close(found[row, :count], want, rtol=1e-9, atol=1e-9)
        assert found[row, count:].isnan().all()
        ids = sorted(range(count), key=lambda i, row=row: -scores[row][i])[:512]
        ids = [*sorted(ids), *[-1] * (512 - len(ids))]
        lists = paged_select.expand_counted(ints([ids]), ints([select_case.POSITIONS[row]]), visible[row : row + 1])
        assert (
            select_case.counted([block for block in ids if block >= 0], select_case.POSITIONS[row]) == lists[0].tolist()
        )


def test_hadamard() -> None:
    x = tensor(values.element_bits(values.random.Random(5), "bf16", 64 * 128), "bf16").view(64, 128)
    want, scale = kpool.hadamard_quant(x)
    for row, exact in enumerate(kpool.hadamard(x).bfloat16().tolist()):
        y = kpool_case.hadamard(x[row].tolist())
        assert y == exact
        assert kpool_case.scale_of(y) == scale[row].item()
        assert [values.rounded(one / scale[row].item(), values.FP8) for one in y] == want[row].float().tolist()
    for edge in (448.0, 447.0, 449.0, 0.0, 1e-5, 3.5):
        assert kpool_case.scale_of([edge]) == kpool.power_scale(torch.tensor(max(edge, 1e-4))).item()


def test_pools() -> None:
    pools = kpool_case.Pools()
    k, score = (tensor(bits, "bf16").view(-1, 4, 128) for bits in (pools.k, pools.score))
    ape = torch.tensor(pools.ape).view(4, 128)
    want = kpool.hadamard(kpool.pool_mean(k, score, ape)).bfloat16().float()
    torch.testing.assert_close(torch.tensor(pools.want), want, rtol=1e-2, atol=2e-3)
    cache = torch.full((kpool_case.PAGES, kpool_case.SIZE, 132), 0xFF, dtype=torch.uint8)
    kpool.write_cache(cache, ints(kpool_case.LOC), *kpool.compress(k, score, ape))
    right = cache.numpy().tobytes()
    assert pools.wrong(right, kpool_case.LOC) == ""
    assert "slot 5 was written" in pools.wrong(right, (-1, *kpool_case.LOC[1:]))
    assert "slot 0: element" in pools.wrong(right, (5, 0, -1, 23, -1, 9))
    doubled = bytearray(right)
    at = kpool_case.SIZE * 128
    doubled[at : at + 4] = struct.pack("<f", 2 * struct.unpack("<f", right[at : at + 4])[0])
    assert "slot 0: element" in pools.wrong(bytes(doubled), kpool_case.LOC)


def test_pool_scores() -> None:
    q, weights, cache, scores = kpool_case.selection_inputs()
    cache = torch.frombuffer(bytearray(cache), dtype=torch.uint8).view(-1, kpool_case.PAGE, 132)
    inputs = (
        tensor(q, "fp8_e4m3").view(2, 32, 128),
        torch.tensor(weights).view(2, 32),
        cache,
        ints([kpool_case.TABLE]),
    )
    found = kpool.scores(*inputs, ints(kpool_case.SEEN), torch.zeros(2, dtype=torch.int64), len(scores[0]))
    for row, want in enumerate(scores):
        torch.testing.assert_close(found[row, : len(want)].tolist(), want, rtol=1e-9, atol=1e-9)


@each
@pytest.mark.parametrize("dim", [256, 128])
def test_metrale_attention(dtype, dim) -> None:
    q, want = metrale_case.attention_inputs(dtype, dim)
    shape = (metrale_case.PAGES, metrale_case.PAGE, metrale_case.KV_HEADS, dim)
    k, v = (tensor(plane, dtype).view(shape) for plane in metrale_case.cache(dtype, dim))
    inputs = (tensor(q, dtype).view(len(metrale_case.LISTS), -1, dim), k, v, ints(metrale_case.TABLE))
    found = metrale.prefill_attn(*inputs, ints(metrale_case.LISTS), metrale_case.LISTED_POS, 4, dim**-0.5)
    torch.testing.assert_close(torch.tensor(want), found.flatten(), rtol=1e-4, atol=1e-5)


# The whole.


@pytest.fixture
def driver(monkeypatch) -> HostDriver:
    """The runners compute by the reference, in the memory of this driver."""
    driver = HostDriver()
    host.install(driver, monkeypatch)
    return driver


def run(driver: HostDriver, *parts, missing=lambda *_: None) -> list[dict[str, object]]:
    """The whole, or some parts of it."""
    with pytest.MonkeyPatch.context() as patch:
        if parts:
            patch.setattr(selftest, "PARTS", parts)
        return selftest.run(0, driver, missing)


def test_right_kernels_pass(driver) -> None:
    checks = run(driver)
    assert [check for check in checks if not check["ok"] or check["skipped"]] == []
    assert len(checks) == len({check["name"] for check in checks}) == 53
    assert driver.memory == {}  # all freed


def test_kernels_that_do_nothing_fail(driver, monkeypatch) -> None:
    host.install_nothing(monkeypatch)
    assert [check["name"] for check in run(driver) if check["ok"]] == []


def test_a_kernel_that_fails_is_named_and_the_others_run_on(driver, monkeypatch) -> None:
    said = "launch of x failed: CUDA_ERROR_LAUNCH_FAILED"

    def refuse(*_: object) -> None:
        raise DriverError(said)

    monkeypatch.setattr(SparseDecodeRunner, "run", staticmethod(refuse))
    checks = run(driver, sparse)
    assert {check["detail"] for check in checks if "decode d" in check["name"]} == {said}
    assert all(check["ok"] for check in checks if "decode d" not in check["name"])


def test_two_launches_that_differ_are_found(driver, monkeypatch) -> None:
    counter = itertools.count()

    def unsteady(dtype: str, p) -> None:
        host.prefill(driver, TYPES[dtype], p)
        if next(counter) % 2:
            driver.memory[p.o_ptr][-2] ^= 1

    monkeypatch.setattr(SparsePrefillRunner, "run", staticmethod(unsteady))
    found = [check["detail"] for check in run(driver, sparse) if "prefill d" in check["name"]]
    assert set(found) == {"two launches gave different bits"}


def test_a_second_launch_that_does_nothing_is_found(driver, monkeypatch) -> None:
    """As of a kernel whose counters the first launch left as they were."""
    counter = itertools.count()

    def once(dtype: str, p) -> None:
        if next(counter) % 2 == 0:
            host.prefill(driver, TYPES[dtype], p)

    monkeypatch.setattr(SparsePrefillRunner, "run", staticmethod(once))
    found = [check["detail"] for check in run(driver, sparse) if "prefill d" in check["name"]]
    assert set(found) == {"two launches gave different bits"}


def test_a_value_that_is_off_is_found(driver, monkeypatch) -> None:
    def off(p) -> None:
        host.paged_attention(driver, None, p)
        driver.tensor(p.o_ptr, torch.bfloat16, p.rows, p.num_q_heads, p.head_dim)[1, 3, 5] += 0.05

    monkeypatch.setattr(PagedAttentionRunner, "run", staticmethod(off))
    found = run(driver, paged_case)
    assert len(found) == 12
    assert not any(check["ok"] for check in found)


def test_a_stash_that_is_lost_is_found(driver, monkeypatch) -> None:
    def forgetful(p) -> None:
        host.decode_update(driver, None, p)
        driver.tensor(p.tail_ptr, torch.bfloat16, p.num_tail_blocks, 2, p.ring, 128)[1, 0, 1] = 0

    monkeypatch.setattr(DecodeUpdate, "run", forgetful)
    found = {check["name"]: check["detail"] for check in run(driver, kpool_case) if not check["ok"]}
    assert found == {"kpool compress and decode bf16": "the tail has not its tokens"}


# What is not there.


@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (8, 0), (12, 0)])
def test_a_case_names_its_kernels_without_ambiguity(capability) -> None:
    """One registered variant answers each that the device has; on SM90 none lacks."""
    sm = sm_rules.preference(SMS, capability)[0]
    for check in selftest.checks(capability):
        for dtype in check.dtypes:
            if selftest.lacking(check, dtype, capability, lambda _: None):
                assert capability != (9, 0)
                continue
            assert check.needs
            for one in check.needs:
                found = variants([sm], one.kernel, [one.head_dim], [one.dtype or dtype])
                assert sum(set(one.baked) <= set(variant.baked) for variant in found) == 1, one


def test_an_older_device_skips_what_it_has_no_kernels_for(monkeypatch) -> None:
    driver = HostDriver((8, 0))
    host.install(driver, monkeypatch)
    checks = run(driver, sparse, paged_case, select_case, kpool_case, metrale_case)
    assert all(check["ok"] for check in checks), checks
    skipped = {check["name"]: check["detail"] for check in checks if check["skipped"]}
    for name, reason in (
        ("sparse_prefill d256 union bf16", "SM (8, 0); targets of the build are sm_90a"),
        ("paged attention d128 rows fp8_e4m3", "type 'fp8_e4m3'; built for sm_80 are bf16"),
        ("kpool hadamard bf16", "no kpool_hadamard here: SM (8, 0)"),
        ("kpool scores and selection fp8_e4m3", "no kpool_scores here: SM (8, 0)"),
    ):
        assert reason in skipped[name]
    for name in ("sparse_decode d256 split_kv fp16", "paged selection prefill bf16", "metrale scores bf16"):
        assert name not in skipped


def test_what_was_not_built_is_skipped_with_a_short_reason(driver) -> None:
    def missing(wanted, device: int) -> str | None:
        if wanted.kernel.startswith("sparse_"):
            return None
        has = ", ".join(f"qsa_{i}" for i in range(200))
        return f"no artifact for {wanted}: /a has for this device: {has}; build it: python build.py --gpu-arch sm_90a"

    checks = run(driver, missing=missing)
    assert all(check["ok"] for check in checks)
    left = {check["name"] for check in checks if not check["skipped"]}
    assert left
    assert all(name.startswith(("sparse_prefill", "sparse_decode")) and "union" not in name for name in left)
    found = next(check["detail"] for check in checks if check["name"] == "kpool expand bf16")
    assert found == "no artifact for kpool_expand d128 bf16; build it: python build.py --gpu-arch sm_90a"
