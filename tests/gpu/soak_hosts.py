"""The soak's second half: every function of `qsa_cute/hosts/`, under a minute on an H200. Run by `make gpu-soak`.

Shapes and inputs are hypothesis' choice, builders and checks those of the tests. "Out of range": what only the device
can check (pages, requests, lengths, ids, counts) is strewn with INT_MIN, -1, one past the end and INT_MAX.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import paged_cases
import paged_select_cases as select_cases
import test_kpool as kpool
import test_kpool_scores as pools
import test_metrale as metrale
import test_paged_attention as attention
import test_paged_select as selection
import torch
from attention_cases import DEVICE, DTYPES, Guarded, normal, seeded, strewn
from hypothesis import given, settings
from hypothesis import strategies as st
from kpool_cases import Tail
from soak import drawn, in_threads

from qsa_cute.hosts import metrale as metrale_host
from qsa_cute.hosts import vllm as vllm_host
from qsa_cute.hosts import vllm_kpool as kpool_host
from qsa_cute.reference import kpool as kpool_reference
from qsa_cute.reference import metrale as metrale_reference
from qsa_cute.reference import paged_select as select_reference
from qsa_cute.runners import paged_attention
from qsa_cute.runners.paged_attention import PagedAttentionRunner
from qsa_cute.runtime import Loader

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
FEW_BYTES = 140  # of a cache that may differ where one pool is more than its share: a pool's own

few = settings(drawn, max_examples=100)
types = st.sampled_from(list(DTYPES))
dims = st.sampled_from([256, 128])
seeds = st.integers(0, 2**20)
indices = st.sampled_from([torch.int32, torch.int64])


# vLLM's attention.

heads = st.tuples(st.integers(1, 16), st.integers(1, 3))
A_CASE = {
    "cache_dtype": st.sampled_from(list(paged_cases.CACHE_DTYPES)),
    "head_dim": dims,
    "lengths": st.lists(st.sampled_from([0, 1, 17, 400, 2051, 3000, 5200]), min_size=1, max_size=4).map(tuple),
    "page_size": st.integers(1, 200).map(lambda n: 16 * n),
    "kinds": st.permutations(paged_cases.KINDS).map(tuple),
    "interleaved": st.booleans(),
    "kv_heads": st.integers(1, 3),
    "seed": seeds,
}
few_rows = st.builds(
    paged_cases.paged, group=st.integers(1, 16), rows=st.integers(1, 60), width=st.integers(1, 2051), **A_CASE
)
many_rows = st.builds(  # so many that they share their gather
    paged_cases.paged,
    group=st.sampled_from([1, 3, 6, 12, 16]),
    rows=st.integers(153, 300),
    width=st.sampled_from([1, 63, 515, 2051]),
    **A_CASE,
)


def check_paged(case: paged_cases.Paged, prefill: bool) -> None:
    out = Guarded(*case.q.shape, dtype=case.q.dtype)
    assert attention.call(case, out.tensor, prefill, vllm_host) is out.tensor
    attention.check(case, out)
    assert torch.equal(attention.call(case, None, not prefill, vllm_host), out.tensor), "the same bits again"


@few
@given(few_rows, st.booleans())
def test_any_paged_attention(case, prefill) -> None:
    check_paged(case, prefill)


@few
@given(many_rows, st.booleans())
def test_any_paged_prefill(case, mixed) -> None:
    """Rows of a request side by side, or the requests in turn."""
    check_paged(case if mixed else attention.by_request(case), True)


@few
@given(st.one_of(few_rows, many_rows), seeds)
def test_paged_attention_out_of_range(case, seed) -> None:
    check_paged(paged_cases.out_of_range(case, seed), False)


def test_two_streams_at_once() -> None:
    """Two threads, each with a stream of its own, over decode and prefill that shares its gather."""
    kinds = [(kind, rows) for kind in paged_cases.CACHE_DTYPES for rows in (12, 300)]
    cases = [[paged_cases.paged(kind, rows=rows, seed=seed) for kind, rows in kinds] for seed in (1, 2)]
    outs = [[Guarded(*case.q.shape, dtype=case.q.dtype) for case in each] for each in cases]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                for case, out in zip(cases[number], outs[number], strict=True):
                    attention.call(case, out.tensor)

    in_threads(lambda: work(0), lambda: work(1))
    for each, found in zip(cases, outs, strict=True):
        for case, out in zip(each, found, strict=True):
            attention.check(case, out)


def test_captures_while_another_thread_preflights(monkeypatch) -> None:
    """Neither the loads nor the captures fail, and what was captured is right."""
    mine, shared = threading.local(), paged_attention.default_loader
    monkeypatch.setattr(paged_attention, "default_loader", lambda: getattr(mine, "loader", None) or shared())
    cases = [paged_cases.paged(rows=rows) for rows in (12, 300)]
    for case in cases:
        attention.call(case)
    torch.cuda.synchronize()
    stop, loads, captured = threading.Event(), [], []

    def load() -> None:
        while not stop.is_set():
            mine.loader = Loader()
            for kind in paged_cases.CACHE_DTYPES:
                PagedAttentionRunner.preflight(kind, device=0)
            loads.append(1)

    def capture() -> None:
        try:
            for i in range(20):
                case, graph = cases[i % 2], torch.cuda.CUDAGraph()
                out = Guarded(*case.q.shape, dtype=case.q.dtype)
                with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                    attention.call(case, out.tensor)
                captured.append((case, graph, out))
        finally:
            stop.set()

    in_threads(load, capture)
    assert loads
    for case, graph, out in captured:
        graph.replay()
        torch.cuda.synchronize()
        attention.check(case, out)


# vLLM's selection.

FP8_BAND = 3e-2  # wgmma's fp8 logits are off by up to 0.015
key_types = st.sampled_from(list(select_cases.DTYPES))
key_pages = st.integers(1, 500).map(lambda n: 4 * n)
seen = st.sampled_from([0, 1, 5, 63, 64, 65, 511, 512, 513, 700, 2000, 5000])


def band(case: select_cases.Paged) -> float:
    return FP8_BAND if case.q.dtype == torch.float8_e4m3fn else select_cases.BAND


def keys_of(visible, base, kind, page, heads, extra, seed):
    extra = extra or int(not any(map(any, visible)))  # a table has a column
    return select_cases.paged(kind, page, visible, heads, extra, base, bool(seed % 2), seed)


def steps_of(columns, query_len, *rest):
    return keys_of(selection.steps(tuple(columns), query_len), 0, *rest)


def prompts(parts, *rest):
    return keys_of(tuple(tuple(range(first, first + count)) for first, count in parts), *rest)


decodes = st.builds(  # one launch and two: up to 8192 columns and, from 8 requests on, more
    steps_of, st.lists(st.one_of(seen, st.just(9000)), min_size=1, max_size=16),
    st.one_of(st.sampled_from([1, 2]), st.integers(1, 8)), key_types, key_pages, st.integers(1, 4), st.integers(0, 2),
    seeds,
)  # fmt: skip
prefills = st.builds(
    prompts, st.lists(st.tuples(seen, st.integers(1, 150)), min_size=1, max_size=4), st.integers(0, 999), key_types,
    key_pages, st.integers(1, 4), st.integers(0, 2), seeds,
)  # fmt: skip


def check_decode(case: select_cases.Paged) -> None:
    found = selection.select_decode(case)
    select_cases.check_ids(found, case, case.logits())
    assert torch.equal(found, selection.select_decode(case)), "the same ids again"


def check_prefill(case: select_cases.Paged) -> None:
    found = selection.select_prefill(case, 4 * case.columns)
    select_cases.check_ids(found, case, case.logits(), band(case))
    assert torch.equal(found, selection.select_prefill(case, 4 * case.columns)), "the same ids again"


@few
@given(decodes)
def test_any_select_decode(case) -> None:
    check_decode(case)


@few
@given(prefills)
def test_any_select_prefill(case) -> None:
    check_prefill(case)


@few
@given(decodes, prefills, seeds)
def test_selection_out_of_range(step, prompt, seed) -> None:
    check_decode(select_cases.out_of_range(step, seed))
    check_prefill(select_cases.out_of_range(prompt, seed))


@few
@given(st.integers(1, 300), st.integers(1, 600), indices, st.integers(0, 3), seeds)
def test_any_expansion(rows, top, kind, offset, seed) -> None:
    """Out of range, too; rows whose position lies before -1, or which see less than nothing, may hold anything."""
    blocks, positions, visible = selection.expansion(rows, top)
    generator = seeded(seed)
    visible = strewn(visible, top + 1, generator)
    positions = strewn(positions.int(), 0, generator)
    sane = (positions >= -1) & (visible >= 0)
    out = Guarded(rows, 4 * top + 4 + offset, dtype=torch.int32)
    found = out.tensor[:, offset:]
    vllm_host.expand_qsa_block_indices(blocks, positions.to(kind), visible, 4, 4 * top, found)
    out.check()
    assert (out.tensor[:, :offset] == -1).all(), "written before a row"
    want = select_reference.expand_counted(blocks, positions, visible, 4 * top)
    assert torch.equal(found[sane], want[sane])


# Metrale.

thetas = st.sampled_from([1.0, 1e4, 5e5, 1e7])
vectors = st.integers(1, 256).flatmap(  # (hd, rot)
    lambda n: st.tuples(st.just(4 * n), st.integers(0, 2 * n).map(lambda half: 2 * half))
)


@few
@given(types, st.integers(1, 70), vectors, thetas, st.integers(0, 10_000), st.integers(1, 300))
def test_any_block_pool(dtype, ratio, vector, theta, first, new) -> None:
    """Where the ratio is no power of two, a mean may round to the next value of its type now and then: up to 8, and in
    a pair that its rotation nearly cancels."""
    out, want = metrale.pool(dtype, ratio, *vector, theta, first, new)
    off = (out.tensor.float() - want.float()).abs()
    beyond = off - metrale.KEY_RTOL * want.float().abs() - metrale.KEY_ATOL
    assert (beyond > 0).sum() <= 1 + off.numel() // 200
    assert (beyond <= 16 * torch.finfo(out.tensor.dtype).eps).all()  # false for NaN


@few
@given(types, st.integers(1, 300), st.integers(1, 6), vectors, thetas, st.integers(0, 1_048_576), st.integers(0, 9))
def test_any_query(dtype, rows, heads, vector, theta, pos, pad) -> None:
    hd, rot = vector
    found, want = metrale.qprep(dtype, rows, heads, hd, rot, theta, pos, 4 * pad)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=metrale.QUERY_ATOL)
    random, kind = seeded(rows), DTYPES[dtype]
    q, weight, out = normal(random, kind, heads, hd), normal(random, kind, hd), Guarded(heads, hd, dtype=torch.float32)
    addresses = (q.data_ptr(), weight.data_ptr(), out.tensor.data_ptr())
    metrale_host.qsa_qprep(*addresses, heads, hd, rot, pos, theta, metrale.EPS, metrale.stream(), dtype=dtype)
    out.check()
    one = metrale_reference.qprep(q[None], weight, pos, rot, theta, metrale.EPS)[0]
    torch.testing.assert_close(out.tensor, one, rtol=1e-4, atol=4 * metrale.QUERY_ATOL)  # of weights 1 + w up to 5


@few
@given(
    types, st.integers(1, 90), st.integers(0, 5000), st.integers(1, 70), st.integers(1, 700), st.integers(0, 9),
    st.integers(1, 6), st.integers(1, 32), seeds,
)  # fmt: skip
def test_any_metrale_scores(dtype, rows, first_pos, ratio, blocks, pad, heads, eighths, seed) -> None:
    q, keys = metrale.queries_and_keys(dtype, rows, blocks, heads, 8 * eighths, seed)
    metrale.check_scores(metrale.score(q[0], keys, dtype), metrale_reference.score(q[0], keys), atol=1e-4)
    for tc in ("", "mma", "wgmma"):
        if tc:
            q, keys = metrale.queries_and_keys(dtype, rows, blocks, seed=seed)
        keys[(first_pos + rows) // ratio :] = torch.nan  # seen by no row
        found = metrale.score_rows(q, keys, dtype, first_pos, ratio, blocks, blocks + pad, tc)
        want = metrale_reference.score_rows(q, keys, first_pos, ratio)
        metrale.check_scores(found, want, atol=2e-4 if tc else 1e-4)


@few
@given(types, st.integers(1, 1600), st.integers(1, 4), st.integers(1, 40), st.integers(8, 2000))
def test_any_gather(dtype, size, kv_heads, eighths, count) -> None:
    metrale.gather(dtype, size, kv_heads, 8 * eighths, count)


@few
@given(
    types, dims, heads, st.integers(1, 40), st.integers(0, 4000), st.integers(0, 600), st.integers(1, 40),
    st.integers(1, 1600), st.sampled_from(["mixed", "full", "none"]),
)  # fmt: skip
def test_any_metrale_attention(dtype, dim, heads, rows, first_pos, topk, ratio, size, kind) -> None:
    found, want = metrale.attend(dtype, dim, *heads, rows, first_pos, topk, ratio, size, kind)
    metrale.check_attention(found, want)


# kpool.

pool_sizes = st.sampled_from([2, 4, 8])


@few
@given(st.sampled_from(["normal", "tiny", "edges", "broken"]), st.integers(1, 3000))
def test_any_hadamard(kind, rows) -> None:
    kpool.test_hadamard(kind, rows, None)


@few
@given(pool_sizes, st.integers(1, 700), st.integers(0, 99), st.booleans(), st.integers(1, 600))
def test_any_compression(pool, page_size, pad, round_scale, count) -> None:
    kpool.compress_and_write(pool, page_size, 4 * pad, round_scale, None, count, FEW_BYTES)


@few
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12).map(tuple), pool_sizes,
    st.integers(0, 9), st.integers(0, 99), indices,
)  # fmt: skip
def test_any_tail_is_seeded(parts, pool, wider, pad, kind) -> None:
    ring, blocks = pool + wider, len(parts) + 2
    tail = Tail(blocks, ring, 2 * ring * 128 + 4 * pad)
    kpool.seed(tail, parts, kind, pool, (INT_MIN, -1, blocks * ring, INT_MAX))


@settings(few, max_examples=40)
@given(st.integers(1, 8), pool_sizes, st.integers(1, 3), st.integers(1, 12))
def test_any_decode_update(next_n, pool, rings, requests) -> None:
    ring = pool * rings
    none = ((INT_MIN, -1), (INT_MIN, -1, (requests + 3) * ring, INT_MAX), (INT_MIN, -1, 640, INT_MAX))
    kpool.decode_update(next_n, pool, ring, None, requests, FEW_BYTES, none)


@few
@given(
    st.integers(1, 40), st.integers(1, 600), st.integers(1, 9), st.sampled_from(["identity", "table", "offsets"]),
    indices, seeds,
)  # fmt: skip
def test_any_pools_become_tokens(rows, groups, pool, way, kind, seed) -> None:
    """Pools and lengths out of range, but for pools past a table, whose tokens do not fit an int32."""
    generator, width = seeded(seed), 300
    ids = torch.randint(-2, width, (rows, groups), generator=generator, device=DEVICE).int()
    if way != "table":
        ids = strewn(ids, 2**30, generator)
    lengths = strewn(torch.randint(0, 3000, (rows,), generator=generator, device=DEVICE).int(), 2**30, generator)
    valid = torch.rand(rows, groups, generator=generator, device=DEVICE) < 0.7
    more = {
        "identity": {},
        "table": {"page_table": torch.randint(0, 10**6, (rows, width), generator=generator, device=DEVICE).to(kind)},
        "offsets": {"topk_offsets": torch.randint(0, 10**6, (rows, 1), generator=generator, device=DEVICE).to(kind)},
    }[way]
    assert kpool_host.history_group_budget_for_topk(groups * pool, pool) == groups
    given_ids, seen = ids.to(kind), lengths.clamp(min=0)
    want = kpool_reference.expand(ids, valid, pool, **more)
    assert torch.equal(kpool_host.expand_pools_to_tokens(given_ids, valid, groups * pool, pool, **more), want)
    both = kpool_reference.append_tail(want, seen, seen // pool, pool, **more)
    assert torch.equal(kpool_host.append_tail_to_topk(want, lengths.to(kind), seen // pool, pool, **more), both)
    kept = kpool_reference.append_tail(
        kpool_reference.expand(ids, ids >= 0, pool, **more), seen, seen // pool, pool, **more
    )
    assert torch.equal(kpool_host.expand_pools_and_append_tail(given_ids, lengths.to(kind), pool, **more), kept)


lengths_seen = st.lists(st.sampled_from([0, 3, 4, 259, 2047, 2048, 2052, 5000]), min_size=1, max_size=12)
requests = st.lists(lengths_seen, min_size=1, max_size=4)
pool_pages = st.integers(1, 90).map(lambda n: 8 * n)


@few
@given(requests, pool_pages, st.integers(0, 9), seeds)
def test_any_pool_selection(lengths, page_size, pad, seed) -> None:
    case = pools.scoring(lengths, page_size, 16 * pad, seed, broken=False)
    pools.check(case, case.scores())
    pools.check_selection(case, max(4, *(length for each in lengths for length in each)))


@few
@given(st.lists(st.sampled_from([0, 3, 4, 259, 2047, 2052, 5000]), min_size=1, max_size=6), st.integers(1, 8), seeds)
def test_any_pool_selection_of_decode(lengths, next_n, seed) -> None:
    case = pools.scoring([[length + j for j in range(next_n)] for length in lengths], 64, seed=seed)
    pools.check_selection(case, max(lengths) + next_n, next_n)


@few
@given(requests, pool_pages, seeds)
def test_pool_selection_out_of_range(lengths, page_size, seed) -> None:
    """Pages, lengths and requests; rows of no request see pools of zeros."""
    case, generator = pools.scoring(lengths, page_size, seed=seed), seeded(seed)
    key, scale = kpool_reference.quantise(normal(generator, torch.float32, case.cache.slots, 128))
    kpool_reference.write_cache(case.cache.tensor, torch.arange(case.cache.slots, device=DEVICE), key, scale)
    case = replace(
        case,
        block_table=strewn(case.block_table, case.cache.tensor.shape[0], generator),
        seq_lens=strewn(case.seq_lens, 4 * case.num_pools + 1, generator, 0.2),
        row_requests=strewn(case.row_requests, len(lengths), generator, 0.2),
    )
    known = (case.row_requests >= 0) & (case.row_requests < len(lengths))
    found = case.scores()
    some = replace(case, q=case.q[known], weights=case.weights[known], seq_lens=case.seq_lens[known])
    pools.check(replace(some, row_requests=case.row_requests[known]), found[known])
    unseen = (found[~known].view(torch.int32) == -1) | (found[~known] == 0)
    assert unseen.all()
    pools.check_selection(case, 4 * case.num_pools + 3)


def test_nothing_to_do() -> None:
    """Without rows no host launches, and all take it."""
    kpool.test_no_rows()
    selection.test_no_rows_and_no_columns()
    metrale.test_nothing_to_do_touches_nothing()
    attention.test_no_rows()
