"""Each launch of the indexer against the reference: poison in all that may not be read, whole-pool comparison."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DTYPES, Guarded, ints, normal, seeded
from indexer_cases import (
    DEVICE,
    LOGIT_ATOL,
    LOGIT_RTOL,
    Indexer,
    bits,
    check_lists,
    check_pool,
    close_keys,
    indexer,
    state,
)

from qsa_cute.geometry import INDEX_WIDTH, TOP_BLOCKS
from qsa_cute.reference import indexer as reference
from qsa_cute.reference.indexer import MASKED, Pool
from qsa_cute.runners import indexer_launch as launches
from qsa_cute.runners import indexer_select as selects

SHORT = (1, 2, 3, 4, 5, 7, 8, 0)
LONG = (2047, 2048, 2049, 2051, 2052, 8192)
BATCHES = pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
TYPES = pytest.mark.parametrize("dtype", DTYPES)


def starts_of(case: Indexer, starts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The case's tokens as later ones: (query_starts, context lengths)."""
    begin = ints(starts)
    return begin, (case.lengths + begin).int()


# Preparation.


def prepare(case: Indexer, starts: torch.Tensor | None = None, lengths: torch.Tensor | None = None) -> torch.Tensor:
    out = Guarded(case.batch, case.tokens, 4, 128, dtype=case.dtype)
    fields = case.rows | {"query_starts": 0 if starts is None else starts.data_ptr()}
    if lengths is not None:
        fields["context_lengths"] = lengths.data_ptr()
    weights = {"cos_sin_ptr": case.cos_sin.data_ptr(), "w_q_ptr": case.w_q.data_ptr()}
    launches.QueryPrepare(q_normed_ptr=out.tensor.data_ptr(), **weights, **fields).run(case.dtype)
    out.check()
    return out.tensor


@TYPES
@BATCHES
def test_query_prepare(dtype, lengths):
    case = indexer(lengths, dtype)
    want = reference.prepare_queries(case.index_qk, case.cos_sin, case.lengths, case.w_q)
    found = prepare(case)
    close_keys(found, want)
    assert not found[want == 0].any(), "padding must be exact zeros"
    assert torch.equal(bits(found), bits(prepare(case)))


def test_query_prepare_of_later_rows():
    case = indexer(SHORT, tokens=9)
    starts, lengths = starts_of(case, (0, 1, 2, 3, 100, 127, 128, 5))
    want = reference.prepare_queries(case.index_qk, case.cos_sin, lengths, case.w_q, query_starts=starts)
    close_keys(prepare(case, starts, lengths), want)


def test_positions_past_the_rope_table_are_padding():
    case = indexer((9, 9))
    starts, lengths = starts_of(case, (len(case.cos_sin) - 4, 2**30))
    found = prepare(case, starts, lengths)
    assert found[0, :4].any()
    assert not found[0, 4:].any()
    assert not found[1].any()


# Key compression.


def compress(case: Indexer, blocks: int, pool: Pool | None = None, dense: bool = True, **changes: object):
    out = Guarded(case.batch, blocks, 128, dtype=case.dtype)
    weights = {"cos_sin_ptr": case.cos_sin.data_ptr(), "w_k_ptr": case.w_k.data_ptr()}
    more = {"pool_state": None if pool is None else state(pool), **weights, **case.rows, **changes}
    kbar = out.tensor.data_ptr() if dense else 0
    launches.KeyCompress(kbar_ptr=kbar, num_blocks=blocks, **more).run(case.dtype)
    out.check()
    return out.tensor


@TYPES
@BATCHES
def test_key_compress(dtype, lengths):
    case = indexer(lengths, dtype)
    blocks = -(-case.tokens // 4)
    want = reference.compress_keys(case.index_qk, case.cos_sin, case.lengths, case.w_k, blocks)
    found = compress(case, blocks)
    close_keys(found, want)
    assert not found[want == 0].any(), "blocks without a key must be exact zeros"


@TYPES
@BATCHES
def test_paged_compress_is_dense_compress(dtype, lengths):
    case = indexer(lengths, dtype)
    blocks = -(-case.tokens // 4)
    pool, want = case.pool(), case.pool()
    reference.compress_keys(case.index_qk, case.cos_sin, case.lengths, case.w_k, blocks, pool=want)
    found = compress(case, blocks, pool)
    assert torch.equal(bits(found), bits(compress(case, blocks)))
    check_pool(pool, case.pool(), want)
    only = case.pool()
    compress(case, blocks, only, dense=False)
    assert torch.equal(bits(only.kv_pool), bits(pool.kv_pool))


def test_a_range_of_blocks_after_a_past():
    """Rows are tokens from past_len on; other blocks of the output stay as they were."""
    whole = indexer((300, 299))
    keys = compress(whole, 75)
    part = indexer((172, 171))
    part.index_qk.copy_(whole.index_qk[:, 128:])
    part.w_k, part.cos_sin = whole.w_k, whole.cos_sin
    found = compress(
        part, 75, block_begin=30, block_end=70, past_len=128, context_lengths=whole.lengths.data_ptr(), seq_len=172
    )
    assert (bits(found[:, :30]) == -1).all()
    assert (bits(found[:, 70:]) == -1).all()
    assert not found[:, 30:32].any(), "blocks before the rows are zeros"
    assert torch.equal(bits(found[:, 32:70]), bits(keys[:, 32:70]))


@pytest.mark.parametrize("cuts", [(1,), (2, 3, 4, 9), (127, 129, 131), (128, 256), tuple(range(1, 40, 3))])
def test_chunks_take_up_where_the_last_ended(cuts):
    case = indexer((301, 130, 7, 4))
    blocks = case.tokens // 4
    whole = compress(case, blocks)
    pool, want, begin = case.pool(), case.pool(), 0
    for end in (*cuts, case.tokens):
        starts, ends = case.lengths.clamp(max=begin), case.lengths.clamp(max=end)
        rows = case.chunk(starts, ends)
        strides = {"index_stride_batch": rows.stride(0), "index_stride_row": rows.stride(1)}
        fields = {
            "index_qk_ptr": rows.data_ptr(),
            "seq_len": rows.shape[1],
            "query_starts": starts.data_ptr(),
            **strides,
        }
        fields["context_lengths"] = ends.data_ptr()
        keys = compress(case, blocks, pool, read_pool=True, **fields)
        tail = {name: fields[name] for name in fields if name != "max_positions"}
        write_tails(case, pool, **tail)
        reference.compress_keys(
            rows, case.cos_sin, ends, case.w_k, blocks, query_starts=starts, pool=want, read_pool=True
        )
        reference.write_raw_tails(rows, ends, want, starts)
        begin = end
    assert torch.equal(bits(keys), bits(whole)), "the last chunk's dense keys are those of one prefill"
    check_pool(pool, case.pool(), want)


def broken(case: Indexer) -> Indexer:
    """Pages inside the context unused or out of range, of K in some, of V in others."""
    table = case.page_table
    table[0, 0, 0], table[0, 1, 1], table[1, 0, 1] = -1, case.flat_pages, -129
    table[1, 1, 0], table[2, 1, 2], table[2, 0, 2] = 2**31 - 1, -1, case.flat_pages
    return case


def test_unmapped_pages():
    case = broken(indexer((299, 257, 383)))
    pool, want = case.pool(), case.pool()
    found = compress(case, 96, pool)
    write_tails(case, pool)
    dense = reference.compress_keys(case.index_qk, case.cos_sin, case.lengths, case.w_k, 96, pool=want)
    reference.write_raw_tails(case.index_qk, case.lengths, want)
    close_keys(found, dense)
    check_pool(pool, case.pool(), want)


# Raw keys.


def write_tails(case: Indexer, pool: Pool, **changes: object) -> None:
    fields = {name: value for name, value in case.rows.items() if name != "max_positions"}
    launches.RawKeyTailWrite(pool_state=state(pool), **{**fields, **changes}).run(case.dtype)


@TYPES
@BATCHES
def test_raw_key_tail_write(dtype, lengths):
    case = indexer(lengths, dtype)
    pool, want = case.pool(), case.pool()
    write_tails(case, pool)
    reference.write_raw_tails(case.index_qk, case.lengths, want)
    check_pool(pool, case.pool(), want)


# Pre-decode.


def pre_decode(case: Indexer, pool: Pool, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    out = Guarded(*rows.shape[:2], 4, 128, dtype=case.dtype)
    fields = {**case.addresses, "index_qk_ptr": rows.data_ptr(), "context_lengths": lengths.data_ptr()}
    strides = {"index_stride_batch": rows.stride(0), "index_stride_row": rows.stride(1)}
    launches.PreDecode(
        q_normed_ptr=out.tensor.data_ptr(),
        pool_state=state(pool),
        batch_size=case.batch,
        query_len=rows.shape[1],
        max_positions=len(case.cos_sin),
        **fields,
        **strides,
    ).run(case.dtype)
    out.check()
    return out.tensor


@TYPES
@pytest.mark.parametrize("query_len", range(1, 9))
def test_pre_decode(dtype, query_len):
    """Sequences that begin, cross a page, complete no block, one or two, or are shorter than the step."""
    lengths = (0, 1, 2, 3, 4, 5, 8, 9, 126, 127, 128, 129, 130, 131, 132, 2048)
    case = indexer(lengths, dtype, seed=query_len)
    starts = (case.lengths - query_len).clamp(min=0)
    pool, before, want = case.pool(), case.pool(), case.pool()
    earlier = case.chunk(torch.zeros_like(starts), starts) if int(starts.max()) else None
    for each in (pool, before, want):
        if earlier is not None:
            reference.write_raw_tails(earlier, starts, each)
    rows = torch.full((case.batch, query_len, 640), torch.nan, dtype=case.dtype, device=DEVICE)
    for b, length in enumerate(lengths):  # the last tokens, right-aligned; positions before 0 are not read
        new = min(query_len, length)
        rows[b, query_len - new :] = case.index_qk[b, length - new : length]
    found = pre_decode(case, pool, rows, case.lengths)
    expected = reference.pre_decode(rows, case.cos_sin, case.lengths, case.w_q, case.w_k, want)
    close_keys(found, expected)
    check_pool(pool, before, want)
    prepared = prepare(case)
    for b, length in enumerate(lengths):
        new = min(query_len, length)
        same = prepared[b, length - new : length]
        assert torch.equal(bits(found[b, query_len - new :]), bits(same)), "decode queries are prefill's, bit by bit"
        assert not found[b, : query_len - new].any()


def test_pre_decode_with_unmapped_pages():
    case = broken(indexer((300, 132, 383)))
    pool, want = case.pool(), case.pool()
    rows = case.chunk(case.lengths - 5, case.lengths)
    pre_decode(case, pool, rows, case.lengths)
    reference.pre_decode(rows, case.cos_sin, case.lengths, case.w_q, case.w_k, want)
    check_pool(pool, case.pool(), want)


# Scores.


def score_case(lengths, starts, rows: int, blocks: int, dtype: str = "bf16", seed: int = 0):
    """Queries and keys with NaN in all that no row sees; reference logits in FP64."""
    generator, kind = seeded(seed), DTYPES[dtype]
    q = normal(generator, kind, len(lengths), rows, 4, 128)
    q[:, :, 3] = -q[:, :, 2]  # heads that cancel unless ReLU comes before the sum
    kbar = normal(generator, kind, len(lengths), blocks, 128)
    context, begin = ints(lengths), ints(starts)
    positions = reference.positions_of(context, rows, begin)
    q[positions < 0] = torch.nan
    for b, seen in enumerate(((positions.amax(1) + 1) // 4).tolist()):
        kbar[b, max(0, seen) :] = torch.nan
    return q, kbar, context, begin, reference.scores(q, kbar, context, begin, torch.float64)


def score(q, kbar, context, begin, algorithm, start=0, count=None, fill=True, blocks=None):
    batch, rows = q.shape[:2]
    blocks = kbar.shape[1] if blocks is None else blocks
    count = batch * rows - start if count is None else count
    out = Guarded(count, blocks, dtype=torch.float32)
    selects.Scores(
        logits_ptr=out.tensor.data_ptr(),
        q_normed_ptr=q.data_ptr(),
        kbar_ptr=kbar.data_ptr(),
        context_lengths=context.data_ptr(),
        query_starts=begin.data_ptr(),
        batch_size=batch,
        seq_len=rows,
        num_blocks=blocks,
        row_start=start,
        num_rows=count,
        fill=fill,
        algorithm=algorithm,
    ).run(q.dtype)
    out.check()
    return out.tensor


@pytest.mark.parametrize("algorithm", ["mma", "wgmma"])
@TYPES
@pytest.mark.parametrize(
    ("lengths", "starts", "rows", "blocks"),
    [
        ((300, 0, 77, 2052), (0, 0, 0, 1752), 300, 513),
        ((1,), (0,), 1, 1),
        ((4099, 4000), (3999, 3840), 100, 1028),
        ((33, 20), (30, 0), 40, 12),
    ],
)
def test_scores(algorithm, dtype, lengths, starts, rows, blocks):
    q, kbar, context, begin, want = score_case(lengths, starts, rows, blocks, dtype)
    found = score(q, kbar, context, begin, algorithm)
    want = want.flatten(0, 1)
    seen = want > MASKED
    assert (found[~seen] == MASKED).all(), "what a row does not see is -FLT_MAX"
    torch.testing.assert_close(found[seen].double(), want[seen], rtol=LOGIT_RTOL, atol=LOGIT_ATOL)
    total = len(lengths) * rows
    part = score(q, kbar, context, begin, algorithm, total // 3, total - total // 3 - total // 5, fill=False)
    whole = found[total // 3 : total - total // 5]
    inside = seen[total // 3 : total - total // 5]
    assert torch.equal(bits(part[inside]), bits(whole[inside])), "a logit depends on its row and block alone"
    assert (bits(part)[~inside] == -1).all(), "without fill the rest is left alone"


@TYPES
@pytest.mark.parametrize("query_len", [1, 2, 4, 5, 8])
def test_decode_scores_are_prefill_scores(dtype, query_len):
    """Bit by bit, both prefill algorithms, keys from the pool."""
    case = indexer((4099, 5, 2052, 131, 0, 8), dtype, seed=query_len)
    blocks, pool = case.tokens // 4, case.pool()
    kbar = compress(case, blocks, pool)
    q = normal(seeded(1), case.dtype, case.batch, query_len, 4, 128)
    out = Guarded(case.batch * query_len, blocks + 3, dtype=torch.float32)
    selects.ScoresDecode(
        logits_ptr=out.tensor.data_ptr(),
        q_normed_ptr=q.data_ptr(),
        context_lengths=case.lengths.data_ptr(),
        pool_state=state(pool),
        batch_size=case.batch,
        max_blocks=blocks,
        query_len=query_len,
        logits_stride_row=blocks + 3,
    ).run(case.dtype)
    out.check()
    starts = reference.decode_starts(case.lengths, query_len).int()
    want = reference.scores(q, kbar, case.lengths, starts, torch.float64).flatten(0, 1)
    seen = torch.zeros_like(out.tensor, dtype=torch.bool)
    seen[:, :blocks] = want > MASKED
    torch.testing.assert_close(out.tensor[seen].double(), want[want > MASKED], rtol=LOGIT_RTOL, atol=LOGIT_ATOL)
    assert (bits(out.tensor)[~seen] == -1).all(), "only the visible prefix is stored"
    for algorithm in ("mma", "wgmma"):
        prefill = score(q, kbar, case.lengths, starts.clamp(min=0), algorithm) if int(starts.min()) >= 0 else None
        if prefill is None:  # a sequence shorter than the step: its rows one by one
            keep = starts >= 0
            again = score(q[keep], kbar[keep], case.lengths[keep], starts[keep], algorithm)
            rows = keep.repeat_interleave(query_len)
            inside = seen[rows][:, :blocks]
            assert torch.equal(bits(again[inside]), bits(out.tensor[rows][:, :blocks][inside]))
        else:
            inside = seen[:, :blocks]
            assert torch.equal(bits(prefill[inside]), bits(out.tensor[:, :blocks][inside]))


# Selection.


FAMILIES = {
    "normal": lambda g, n: normal(g, torch.float32, n),
    "equal": lambda g, n: torch.full((n,), 0.25, device=DEVICE),
    "narrow": lambda g, n: 1 + 1e-3 * torch.rand(n, generator=g, device=DEVICE),
    "ties": lambda g, n: torch.cat(
        [torch.full((c,), v, device=DEVICE) for c, v in ((400, 2.0), (150, 1.0), (n - 550, 0.0))]
    )[torch.randperm(n, generator=g, device=DEVICE)],
    "rounded": lambda g, n: (2 * normal(g, torch.float32, n)).round() / 2,
    "zeros": lambda g, n: torch.where(torch.rand(n, generator=g, device=DEVICE) < 0.5, 0.0, -0.0),
    "nan": lambda g, n: torch.where(torch.rand(n, generator=g, device=DEVICE) < 0.9, torch.nan, 1.0),
    "infinite": lambda g, n: torch.where(torch.rand(n, generator=g, device=DEVICE) < 0.99, -torch.inf, torch.inf),
}


def select(logits, lengths, cluster=None, **changes):
    """Decode rows of one token each."""
    expand = changes.get("expand", True)
    out = Guarded(len(logits), INDEX_WIDTH if expand else TOP_BLOCKS, dtype=torch.int32)
    counters = torch.full((len(logits), 2), 7, dtype=torch.int32, device=DEVICE)
    fields = {"from_end": True, "split_counters": counters.data_ptr(), **changes}
    selects.Select(
        logits_ptr=logits.data_ptr(),
        out_ptr=out.tensor.data_ptr(),
        context_lengths=lengths.data_ptr(),
        batch_size=len(logits),
        seq_len=1,
        num_blocks=logits.shape[1],
        logits_stride_row=logits.stride(0),
        cluster=cluster,
        **fields,
    ).run("bf16")
    out.check()
    assert not counters.any(), "split counters must be zeroed"
    return out.tensor


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, None])
@pytest.mark.parametrize("visible", [511, 512, 513, 2048, 16385, 30938, 65536])
def test_selection(cluster, visible):
    """Exact and stable; NaN and +inf past what a row sees; rows at any alignment."""
    generator, width = seeded(visible), visible + 37 + visible % 2
    logits = torch.full((len(FAMILIES), width), torch.nan, device=DEVICE)
    logits[::2] = torch.inf
    for row, family in enumerate(FAMILIES.values()):
        logits[row, :visible] = family(generator, max(visible, 600))[:visible]
    lengths = torch.full((len(logits),), 4 * visible + 3, dtype=torch.int32, device=DEVICE)
    rank_order = reference.select(logits, lengths // 4).int()
    if visible > TOP_BLOCKS:
        assert torch.equal(select(logits, lengths, cluster, expand=False, ranked=True), rank_order)
    else:  # all are taken, and the logits are not read
        rank_order[:, :visible] = torch.arange(visible, device=DEVICE, dtype=torch.int32)
    ascending = torch.where(rank_order >= 0, rank_order, 2**30).sort(1).values
    ascending = torch.where(ascending < 2**30, ascending, -1)
    assert torch.equal(select(logits, lengths, cluster, expand=False), ascending)
    assert torch.equal(select(logits, lengths, cluster), reference.expand(ascending, lengths.long() - 1))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("blocks", [513, 2048, 2049, 4096, 8190, 8192, 16384, 32768, 40001, 65536])
def test_selection_at_what_is_held(blocks, offset):
    """Rows as long as what registers hold, aligned or not, seen whole or in part: a cluster may have idle blocks."""
    generator = seeded(blocks)
    stored = torch.empty(len(FAMILIES), blocks // 4 * 4 + 4, device=DEVICE)
    logits = stored[:, offset : offset + blocks]
    for visible in sorted({513, max(513, blocks // 2 + 1), blocks}):
        stored.fill_(torch.nan)
        stored[::2] = torch.inf
        for row, family in enumerate(FAMILIES.values()):
            logits[row, :visible] = family(generator, max(visible, 600))[:visible]
        lengths = torch.full((len(logits),), 4 * visible + 3, dtype=torch.int32, device=DEVICE)
        best = reference.select(logits, lengths // 4).int()
        assert torch.equal(select(logits, lengths, expand=False, ranked=True), best)
        ascending = best.sort(1).values
        assert torch.equal(select(logits, lengths, expand=False), ascending)
        assert torch.equal(select(logits, lengths), reference.expand(ascending, lengths.long() - 1))


def test_prefill_selection_in_chunks():
    lengths, rows, blocks = (2600, 1301), 2600, 650
    logits = normal(seeded(5), torch.float32, 2 * rows, blocks)
    positions = reference.positions_of(ints(lengths), rows, None).flatten()
    out = Guarded(2 * rows, INDEX_WIDTH, dtype=torch.int32)
    context = ints(lengths)
    for start in range(0, 2 * rows, 1000):
        count = min(1000, 2 * rows - start)
        selects.Select(
            logits_ptr=logits[start].data_ptr(),
            out_ptr=out.tensor[start].data_ptr(),
            context_lengths=context.data_ptr(),
            batch_size=2,
            seq_len=rows,
            num_blocks=blocks,
            row_start=start,
            num_rows=count,
        ).run("fp16")
    out.check()
    check_lists(out.tensor, logits, positions)


# Ids and expansion.


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 1023), (3, 1025), (70_000, 5), (2, 262_144)])
def test_ids_fill(rows, blocks):
    out = Guarded(rows, blocks, dtype=torch.int32)
    launches.IdsFill(ids_ptr=out.tensor.data_ptr(), num_rows=rows, num_blocks=blocks).run("bf16")
    out.check()
    assert (out.tensor == torch.arange(blocks, device=DEVICE)).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_expand(dtype):
    lengths, rows, blocks = (2600, 0, 2053, 1), 2600, 650
    context, generator = ints(lengths), seeded(9)
    positions = reference.positions_of(context, rows, None).flatten()
    visible = torch.where(positions >= 0, (positions + 1) // 4, 0)
    ids = torch.rand(len(positions), blocks, generator=generator, device=DEVICE).argsort(1)
    ids = torch.where(
        torch.arange(blocks, device=DEVICE) < visible[:, None], ids % visible.clamp(min=1)[:, None], 2**29
    )
    ids = ids.int()
    out = Guarded(len(positions), INDEX_WIDTH, dtype=torch.int32)
    for start, count in ((0, 5000), (5000, len(positions) - 5000)):
        launches.Expand(
            out_idx_ptr=out.tensor.data_ptr(),
            sorted_ids_ptr=ids[start].data_ptr(),
            context_lengths=context.data_ptr(),
            batch_size=4,
            seq_len=rows,
            num_blocks=blocks,
            row_start=start,
            num_rows=count,
        ).run(dtype)
    out.check()
    assert torch.equal(out.tensor, reference.expand(ids, positions))


# Large pools.


def test_a_pool_past_two_to_the_31_elements():
    """Tails in the last pages: offsets do not fit 32 bits."""
    case = indexer((131, 200))
    flat = 2**31 // (128 * 2 * 384) + 200
    flat += flat % 2
    pool = Pool(torch.empty(flat, 128, 2, 384, dtype=case.dtype, device=DEVICE), case.page_table)
    small = case.pool()
    last = torch.arange(flat - case.page_table.numel(), flat, device=DEVICE, dtype=torch.int32)
    case.page_table.copy_(last.view_as(case.page_table))
    for each, table in ((pool, case.page_table), (small, last.view_as(case.page_table) - last[0])):
        each = Pool(each.kv_pool, table.contiguous())
        compress(case, 50, each)
        write_tails(case, each)
        pre_decode(case, each, case.chunk(case.lengths - 4, case.lengths), case.lengths)
    tails = pool.kv_pool[last[0] :, :, 0, 256:]
    stored = small.kv_pool[: len(last), :, 0, 256:]
    written = ~stored.isnan()
    assert written.any()
    assert torch.equal(bits(tails)[written], bits(stored)[written])
