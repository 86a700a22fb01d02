"""Metrale's operations by the host's functions against the reference: poison in all that may not be read, guard bands
around what is written, bits where bits are promised."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ATOL, BAD_IDS, DEVICE, DTYPES, Guarded, ints, normal, seeded
from torch import Tensor

from qsa_cute.hosts import metrale as host
from qsa_cute.reference import indexer as indexer_reference
from qsa_cute.reference import metrale as reference
from qsa_cute.runners import indexer_launch
from qsa_cute.runners.metrale import ScoreRowsTc

TYPES = pytest.mark.parametrize("dtype", DTYPES)
THETA, EPS = 1.0e7, 1.0e-6
KEY_RTOL, KEY_ATOL = 1e-2, 1e-3
QUERY_ATOL = 1e-3  # of prepared queries, FP32: at any position
NAN = float("nan")


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


# Norms.

NORMS = pytest.mark.parametrize(
    ("ratio", "hd", "rot", "theta"),
    [
        (4, 128, 64, THETA),
        (16, 256, 128, 1e4),
        (1, 8, 0, THETA),
        (3, 1024, 1024, 5e5),
        (5, 20, 6, 1.0),
        (64, 132, 132, 1e4),
    ],
)


def pool(dtype: str, ratio: int, hd: int, rot: int, theta: float, first: int, new: int) -> tuple[Guarded, Tensor]:
    """(keys of the new blocks, reference): raw keys lie so that `first` blocks before them need not exist."""
    random, kind = seeded(hd), DTYPES[dtype]
    raw = normal(random, kind, new * ratio + 8, hd)
    raw[:4] = raw[4 + new * ratio :] = NAN
    weight = 0.1 * normal(random, kind, hd)
    out = Guarded(new, hd, dtype=kind)
    begin = raw[4:].data_ptr() - first * ratio * hd * 2
    keys = out.tensor.data_ptr() - first * hd * 2
    host.qsa_block_pool(begin, weight.data_ptr(), keys, first, new, ratio, hd, rot, theta, EPS, stream(), dtype=dtype)
    out.check()
    return out, reference.block_pool(raw[4 : 4 + new * ratio], weight, first, ratio, rot, theta, EPS)


@TYPES
@NORMS
@pytest.mark.parametrize("first", [0, 1001, None])
def test_block_pool(dtype, ratio, hd, rot, theta, first):
    first = 1_000_000 // ratio if first is None else first
    out, want = pool(dtype, ratio, hd, rot, theta, first, 37)
    torch.testing.assert_close(out.tensor.float(), want.float(), rtol=KEY_RTOL, atol=KEY_ATOL)
    again, _ = pool(dtype, ratio, hd, rot, theta, first, 37)
    assert torch.equal(bits(out.tensor), bits(again.tensor))


def test_many_blocks_are_pooled():
    out, want = pool("bf16", 4, 128, 64, THETA, 3, 5000)
    torch.testing.assert_close(out.tensor.float(), want.float(), rtol=KEY_RTOL, atol=KEY_ATOL)


def qprep(dtype: str, rows: int, heads: int, hd: int, rot: int, theta: float, pos: int, pad: int = 8):
    """(prepared queries, reference) of rows of a wider projection, NaN in its other columns."""
    random, kind = seeded(rows + hd), DTYPES[dtype]
    width = heads * hd
    qk = torch.full((rows, width + pad), NAN, dtype=kind, device=DEVICE)
    qk[:, :width] = normal(random, kind, rows, width)
    weight = 0.1 * normal(random, kind, hd)
    out = Guarded(rows, heads, hd, dtype=torch.float32)
    pointers = qk.data_ptr(), weight.data_ptr(), out.tensor.data_ptr()
    sizes = heads, hd, rot
    host.qsa_qprep_rows(*pointers, rows, pos, width + pad, *sizes, theta, EPS, stream(), dtype=dtype)
    out.check()
    q = qk[:, :width].unflatten(1, (heads, hd))
    return out.tensor, reference.qprep(q, weight, pos, rot, theta, EPS)


@TYPES
@NORMS
@pytest.mark.parametrize("pos", [0, 12345, 1_048_000])
def test_qprep_rows(dtype, ratio, hd, rot, theta, pos):
    found, want = qprep(dtype, 33, 3, hd, rot, theta, pos)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=QUERY_ATOL)
    assert torch.equal(bits(found), bits(qprep(dtype, 33, 3, hd, rot, theta, pos)[0]))


def test_angles_hold_where_fp32_loses_them():
    """At a million, an FP32 product of position and frequency is off by hundredths of a radian; here by 1e-5."""
    found, want = qprep("bf16", 64, 4, 128, 64, THETA, 1_048_512)
    assert (found - want).abs().max() < 2e-5
    frequencies = THETA ** -(torch.arange(32, dtype=torch.float64) / 32)
    fp32 = (1_048_512.0 * frequencies.float()).double() - 1_048_512 * frequencies
    assert fp32.abs().max() > 5e-3, "then this test shows nothing"


def test_one_query_is_a_row():
    rows, _ = qprep("bf16", 5, 4, 128, 64, THETA, 900)
    random = seeded(5 + 128)
    q = normal(random, torch.bfloat16, 5, 512)
    weight = 0.1 * normal(random, torch.bfloat16, 128)
    for row in (0, 4):
        out = Guarded(4, 128, dtype=torch.float32)
        pointers = q[row].contiguous(), weight, out.tensor
        addresses = [one.data_ptr() for one in pointers]
        host.qsa_qprep(*addresses, 4, 128, 64, 900 + row, THETA, EPS, stream())
        out.check()
        assert torch.equal(bits(out.tensor), bits(rows[row]))


def test_many_rows_are_prepared():
    found, want = qprep("bf16", 70_000, 1, 128, 64, THETA, 7)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=QUERY_ATOL)


@TYPES
def test_norms_are_the_indexers(dtype):
    """Dims past the rotation do not see the angles: there, the bits are the indexer's own kernels'."""
    random, kind = seeded(1), DTYPES[dtype]
    qk = normal(random, kind, 64, 640)
    w = 0.1 * normal(random, kind, 128)
    table = indexer_reference.rope_table(64, DEVICE)
    keys, queries = (torch.empty(16, n, 128, dtype=kind, device=DEVICE) for n in (1, 16))
    lengths = ints([64])
    common = {"index_qk_ptr": qk.data_ptr(), "cos_sin_ptr": table.data_ptr(), "context_lengths": lengths.data_ptr()}
    common |= {"batch_size": 1, "seq_len": 64}
    indexer_launch.KeyCompress(kbar_ptr=keys.data_ptr(), w_k_ptr=w.data_ptr(), num_blocks=16, **common).run(kind)
    indexer_launch.QueryPrepare(q_normed_ptr=queries.data_ptr(), w_q_ptr=w.data_ptr(), **common).run(kind)
    raw = qk[:, 512:].contiguous()
    ours, q_ours = torch.empty_like(keys[:, 0]), torch.empty(64, 4, 128, device=DEVICE)
    norm = 128, 64, THETA, EPS, stream()
    host.qsa_block_pool(raw.data_ptr(), w.data_ptr(), ours.data_ptr(), 0, 16, 4, *norm, dtype=dtype)
    host.qsa_qprep_rows(qk.data_ptr(), w.data_ptr(), q_ours.data_ptr(), 64, 0, 640, 4, *norm, dtype=dtype)
    assert torch.equal(bits(ours[:, 64:]), bits(keys[:, 0, 64:]))
    assert torch.equal(bits(ours[0]), bits(keys[0, 0])), "and where the angle is zero"
    assert torch.equal(bits(q_ours.to(kind)[..., 64:]), bits(queries.view(64, 4, 128)[..., 64:]))


# Scores. "wgmma" is what the host's function takes on the H200.

TC_FIELDS = ["q", "block_keys", "scores", "rows", "n_blocks_max", "first_pos", "score_stride", "ratio", "stream"]
KERNELS = pytest.mark.parametrize("tc", ["", "mma", "wgmma"], ids=["exact", "mma", "wgmma"])


def queries_and_keys(dtype: str, rows: int, blocks: int, heads: int = 4, hd: int = 128, seed: int = 0):
    random = seeded(seed)
    q = normal(random, torch.float32, rows, heads, hd)
    return q, normal(random, DTYPES[dtype], blocks, hd)


def score(q: Tensor, keys: Tensor, dtype: str, blocks: int | None = None) -> Tensor:
    blocks = len(keys) if blocks is None else blocks
    out = Guarded(blocks, dtype=torch.float32)
    pointers = q.data_ptr(), keys.data_ptr(), out.tensor.data_ptr()
    host.qsa_score(*pointers, blocks, *q.shape, stream(), dtype=dtype)
    out.check()
    return out.tensor


def score_rows(
    q: Tensor, keys: Tensor, dtype: str, first_pos: int, ratio: int, blocks: int, stride: int = 0, tc: str = ""
) -> Tensor:
    """Scores [rows, blocks]; columns up to the stride must stay as they were."""
    rows, heads, hd = q.shape
    stride = stride or blocks
    out = Guarded(rows, stride, dtype=torch.float32)
    pointers = q.data_ptr(), keys.data_ptr(), out.tensor.data_ptr()
    sizes = rows, blocks, first_pos, stride, ratio
    if tc == "mma":
        fields = dict(zip(TC_FIELDS, (*pointers, *sizes, stream()), strict=True))
        ScoreRowsTc(**fields, algorithm="mma").run(dtype)
    elif tc:
        host.qsa_score_rows_tc(*pointers, *sizes, stream(), dtype=dtype)
    else:
        host.qsa_score_rows(*pointers, *sizes, heads, hd, stream(), dtype=dtype)
    out.check()
    assert (bits(out.tensor[:, blocks:]) == -1).all(), "written past the columns"
    return out.tensor[:, :blocks].clone()


def check_scores(found: Tensor, want: Tensor, atol: float = 2e-5) -> None:
    assert torch.equal(found == -torch.inf, want == -torch.inf), "-inf in other places than the reference's"
    seen = want > -torch.inf
    torch.testing.assert_close(found[seen].double(), want[seen], rtol=1e-5, atol=atol)


@TYPES
@pytest.mark.parametrize("blocks", [1, 31, 33, 127, 1000, 4097])
def test_score(dtype, blocks):
    q, keys = queries_and_keys(dtype, 1, blocks + 5)
    keys[blocks:] = NAN
    found = score(q[0], keys, dtype, blocks)
    check_scores(found, reference.score(q[0], keys[:blocks]))
    assert torch.equal(bits(found), bits(score(q[0], keys, dtype, blocks)))


SHAPES = pytest.mark.parametrize(("heads", "hd"), [(1, 8), (3, 64), (4, 136), (6, 128), (8, 256), (5, 1024)])


@SHAPES
def test_score_of_other_shapes(heads, hd):
    q, keys = queries_and_keys("bf16", 1, 70, heads, hd)
    check_scores(score(q[0], keys, "bf16"), reference.score(q[0], keys), atol=1e-4)


ROWS = pytest.mark.parametrize(
    ("rows", "first_pos", "ratio", "blocks", "stride"),
    [
        (1, 0, 4, 3, 0),
        (16, 0, 4, 5, 8),
        (17, 1000, 4, 254, 260),
        (33, 997, 4, 300, 301),
        (40, 4096, 4, 1032, 1032),
        (64, 77, 3, 47, 47),
        (50, 130, 1, 200, 0),
        (9, 2_000_000, 64, 130, 132),
    ],
)


@TYPES
@ROWS
@KERNELS
def test_score_rows(tc, dtype, rows, first_pos, ratio, blocks, stride):
    q, keys = queries_and_keys(dtype, rows, blocks)
    keys[(first_pos + rows) // ratio :] = NAN  # seen by no row
    found = score_rows(q, keys, dtype, first_pos, ratio, blocks, stride, tc)
    check_scores(found, reference.score_rows(q, keys, first_pos, ratio), atol=2e-4 if tc else 2e-5)
    assert torch.equal(bits(found), bits(score_rows(q, keys, dtype, first_pos, ratio, blocks, stride, tc)))


@KERNELS
def test_a_key_that_a_row_does_not_see_does_not_reach_it(tc):
    """Row r sees r + 1 blocks at ratio 1; the last block is NaN, and only the last row may show it (as 0)."""
    q, keys = queries_and_keys("bf16", 40, 40)
    keys[39] = NAN
    found = score_rows(q, keys, "bf16", 0, 1, 40, tc=tc)
    assert not found.isnan().any()
    check_scores(found[:39], reference.score_rows(q[:39], keys, 0, 1), atol=2e-4)


@SHAPES
def test_score_rows_of_other_shapes(heads, hd):
    q, keys = queries_and_keys("bf16", 21, 140, heads, hd)
    found = score_rows(q, keys, "bf16", 500, 4, 140)
    check_scores(found, reference.score_rows(q, keys, 500, 4), atol=1e-4)
    last = score(q[20], keys, "bf16", 130)
    assert torch.equal(bits(found[20, :130]), bits(last)), "a row's bits are the decode kernel's"


@TYPES
def test_rows_have_the_bits_of_single_queries(dtype):
    q, keys = queries_and_keys(dtype, 19, 515)
    found = score_rows(q, keys, dtype, 4 * 515, 4, 515)
    for row in range(19):
        assert torch.equal(bits(found[row]), bits(score(q[row], keys, dtype)))


def cancelling(dtype: str, rows: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Queries and keys whose dot products are small sums of large terms: keys orthogonal to a plane that all queries
    lie near, so that one rounding of a query moves its scores by as much as they differ."""
    random = seeded(11)
    plane = torch.linalg.qr(torch.randn(128, 8, generator=random, device=DEVICE, dtype=torch.float64))[0]
    keys = torch.randn(blocks, 128, generator=random, device=DEVICE, dtype=torch.float64)
    keys = (keys - keys @ plane @ plane.T).to(DTYPES[dtype])
    q = 3 * torch.randn(rows, 4, 8, generator=random, device=DEVICE, dtype=torch.float64) @ plane.T
    q = q + (0.05 if dtype == "bf16" else 0.01) * torch.randn(
        rows, 4, 128, generator=random, device=DEVICE, dtype=torch.float64
    )
    return q.float(), keys


@TYPES
@pytest.mark.parametrize("tc", ["mma", "wgmma"])
def test_two_terms_keep_the_selection(tc, dtype):
    rows, blocks, top = 24, 4096, 512
    q, keys = cancelling(dtype, rows, blocks)
    first_pos = 4 * blocks

    def chosen(scores: Tensor) -> Tensor:
        members = torch.zeros(rows, blocks, dtype=torch.bool, device=DEVICE)
        return members.scatter_(1, scores.topk(top).indices, True)

    exact = score_rows(q, keys, dtype, first_pos, 4, blocks)
    two = score_rows(q, keys, dtype, first_pos, 4, blocks, tc=tc)
    one = reference.score_rows(q.to(DTYPES[dtype]), keys, first_pos, 4)
    want = reference.score_rows(q, keys, first_pos, 4)
    kth = want.topk(top).values[:, -1:]
    moved = (chosen(one) != chosen(want)).sum(1) // 2
    assert moved.max() >= 4, "one rounding must move blocks, or this test shows nothing"
    different = chosen(two) != chosen(exact)
    assert not (different & ((want - kth).abs() > 5e-4 * kth)).any(), "a block beyond a tie of the FP32 scores moved"
    assert (different.sum(1) // 2 <= 2).all()


def test_offsets_past_2_31():
    q, keys = queries_and_keys("bf16", 3, 200)
    want = reference.score_rows(q, keys, 800, 4)
    stride = 2**30 + 4
    out = torch.empty(2 * stride + 200, dtype=torch.float32, device=DEVICE)
    view = out.as_strided((3, 200), (stride, 1))
    for tc in (False, True):
        view.fill_(NAN)
        sizes = 3, 200, 800, stride, 4
        pointers = q.data_ptr(), keys.data_ptr(), out.data_ptr()
        if tc:
            host.qsa_score_rows_tc(*pointers, *sizes, stream())
        else:
            host.qsa_score_rows(*pointers, *sizes, 4, 128, stream())
        check_scores(view, want, atol=2e-4)


@KERNELS
def test_more_rows_than_a_grid_is_high(tc):
    rows = 70_001
    q, keys = queries_and_keys("bf16", rows, 9)
    found = score_rows(q, keys, "bf16", 20, 4, 9, tc=tc)
    check_scores(found, reference.score_rows(q, keys, 20, 4), atol=2e-4)


# The cache.


def cache(dtype: str, pages: int, size: int, kv_heads: int, hd: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = seeded(seed)
    return tuple(normal(random, DTYPES[dtype], pages, size, kv_heads, hd) for _ in range(2))


def page_table(pages: int, random: torch.Generator) -> Tensor:
    return torch.randperm(pages, generator=random, device=DEVICE).int()


@TYPES
@pytest.mark.parametrize(("size", "kv_heads", "hd"), [(16, 2, 256), (48, 1, 128), (784, 1, 8), (1, 3, 24)])
def test_gather(dtype, size, kv_heads, hd):
    gather(dtype, size, kv_heads, hd, 777)


def gather(dtype: str, size: int, kv_heads: int, hd: int, count: int) -> None:
    pages = 3000 // size + 2
    k, v = cache(dtype, pages, size, kv_heads, hd)
    table = page_table(pages, seeded(3))
    table[1] = -1
    sel = torch.randint(-2, min(3000, pages * size), (count,), generator=seeded(4), device=DEVICE).int()
    sel[:8] = ints([-1, -(2**31), 0, size, 2 * size - 1, 1, 1, -5])
    used = torch.zeros(pages * size, dtype=torch.bool, device=DEVICE)
    token = sel.long()[sel >= 0]
    page = table.long()[token // size]
    used[(page * size + token % size)[page >= 0]] = True
    for plane in (k, v):
        plane.view(pages * size, kv_heads, hd)[~used] = NAN
    outs = [Guarded(count, kv_heads, hd, dtype=DTYPES[dtype]) for _ in range(2)]
    pointers = [one.data_ptr() for one in (k, v, table, sel, outs[0].tensor, outs[1].tensor)]
    before = outs[0].tensor.clone()
    host.qsa_gather(*pointers, count, size, kv_heads, hd, stream(), dtype=dtype)
    for plane, out in zip((k, v), outs, strict=True):
        out.check()
        assert torch.equal(bits(out.tensor), bits(reference.gather(plane, table, sel, before)))


def block_lists(kind: str, rows: int, first_pos: int, topk: int, ratio: int, seed: int) -> Tensor:
    """int32 [rows, topk], each row of one of the ways a list may look."""
    random = torch.Generator().manual_seed(seed)
    lists = torch.full((rows, topk), -1, dtype=torch.int32)
    for row in range(rows):
        complete = (first_pos + row + 1) // ratio
        ids = torch.randperm(complete, generator=random).int()[:topk]
        lists[row, : len(ids)] = ids
        if kind == "mixed" and row % 4 == 1:  # as a top-k over masked scores leaves it: ids that are not complete
            lists[row, len(ids) :] = torch.arange(complete, complete + topk - len(ids)).int()
            lists[row] = lists[row, torch.randperm(topk, generator=random)]
        if kind == "mixed" and row % 4 == 2:
            bad = torch.tensor([*BAD_IDS, complete, complete + 1], dtype=torch.int32)
            at = torch.rand(topk, generator=random) < 0.3
            lists[row, at] = bad[torch.randint(len(bad), (int(at.sum()),), generator=random)]
        if kind == "mixed" and row % 4 == 3:
            lists[row, topk // 2 :] = lists[row, : topk - topk // 2].clone()
        if kind == "none":
            lists[row] = -1
    return lists.to(DEVICE)


def attend(
    dtype: str = "bf16",
    hd: int = 256,
    group: int = 12,
    kv_heads: int = 2,
    rows: int = 12,
    first_pos: int = 3000,
    topk: int = 512,
    ratio: int = 4,
    size: int = 16,
    kind: str = "mixed",
    holes: bool = True,
) -> tuple[Tensor, Tensor]:
    """(attention, reference), NaN in every cell of the cache that no list names."""
    random, length = seeded(hd + rows), first_pos + rows
    pages = -(-length // size)
    k, v = cache(dtype, pages + 1, size, kv_heads, hd, seed=rows)
    table = page_table(pages + 1, random)
    if holes and pages > 6:
        table[2], table[5] = -1, -(2**31)
    q = normal(random, DTYPES[dtype], rows, kv_heads * group, hd)
    lists = block_lists(kind, rows, first_pos, topk, ratio, seed=rows)
    token = reference.tokens(lists, first_pos, ratio)
    token = token[token >= 0].long()
    page = table.long()[token // size]
    used = torch.zeros((pages + 1) * size, dtype=torch.bool, device=DEVICE)
    used[(page * size + token % size)[page >= 0]] = True
    for plane in (k, v):
        plane.view(-1, kv_heads, hd)[~used] = NAN
    out = Guarded(*q.shape, dtype=q.dtype)
    pointers = [one.data_ptr() for one in (q, k, v, table, lists, out.tensor)]
    sizes = rows, first_pos, topk, ratio, size, kv_heads * group, kv_heads, hd
    host.qsa_prefill_attn(*pointers, *sizes, hd**-0.5, stream(), dtype=dtype)
    out.check()
    return out.tensor, reference.prefill_attn(q, k, v, table, lists, first_pos, ratio, hd**-0.5)


def check_attention(found: Tensor, want: Tensor) -> None:
    empty = (want == 0).all(-1)
    assert (found[empty] == 0).all(), "a row with no token must be exact zeros"
    error = (found.float() - want).abs().max().item()
    assert error <= ATOL, f"largest error {error}"


@TYPES
@pytest.mark.parametrize("hd", [256, 128])
@pytest.mark.parametrize(("group", "kv_heads"), [(12, 2), (1, 1), (16, 1), (3, 3)])
def test_prefill_attention(dtype, hd, group, kv_heads):
    found, want = attend(dtype, hd, group, kv_heads)
    check_attention(found, want)
    assert torch.equal(bits(found), bits(attend(dtype, hd, group, kv_heads)[0]))


@pytest.mark.parametrize(
    "shape",
    [
        {"first_pos": 0, "rows": 40},
        {"first_pos": 0, "rows": 9, "kind": "none"},
        {"first_pos": 2040, "rows": 24, "size": 784},
        {"ratio": 3, "topk": 100, "size": 48},
        {"ratio": 1, "topk": 300, "first_pos": 600},
        {"ratio": 16, "topk": 64, "size": 48},
        {"ratio": 128, "topk": 5, "size": 7},
        {"ratio": 4, "topk": 1, "first_pos": 3, "rows": 5},
        {"topk": 0},
        {"topk": 2048, "first_pos": 9000, "rows": 3},
        {"size": 1568, "holes": False},
    ],
    ids=lambda shape: "-".join(f"{key}{value}" for key, value in shape.items()),
)
def test_prefill_attention_of_other_shapes(shape):
    found, want = attend(**shape)
    check_attention(found, want)


def test_a_short_row_is_dense_under_a_full_top_k():
    """A top-k over masked scores fills up with ids that are not complete: such a row attends to all it may see."""
    rows, hd = 300, 128
    random = seeded(5)
    q = normal(random, torch.bfloat16, rows, 4, hd)
    k, v = cache("bf16", 19, 16, 1, hd)
    table = page_table(19, random)
    lists = torch.arange(128, device=DEVICE).int().repeat(rows, 1)
    out = torch.empty_like(q)
    pointers = [one.data_ptr() for one in (q, k, v, table, lists, out)]
    host.qsa_prefill_attn(*pointers, rows, 0, 128, 4, 16, 4, 1, hd, hd**-0.5, stream())
    dense = [plane[table.long()].flatten(0, 1)[:rows, 0][None].float() for plane in (k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1), *(one.expand(4, -1, -1) for one in dense), is_causal=True
    )
    check_attention(out, want.transpose(0, 1))


def test_many_rows_attend():
    rows = 66_000
    q = normal(seeded(8), torch.bfloat16, rows, 1, 128)
    k, v = cache("bf16", rows // 64 + 2, 64, 1, 128)
    table = page_table(rows // 64 + 2, seeded(9))
    lists = (torch.arange(rows, device=DEVICE).int() // 8)[:, None].contiguous()
    out = torch.full_like(q, NAN)
    pointers = [one.data_ptr() for one in (q, k, v, table, lists, out)]
    host.qsa_prefill_attn(*pointers, rows, 0, 1, 4, 64, 1, 1, 128, 128**-0.5, stream())
    check_attention(out, reference.prefill_attn(q, k, v, table, lists, 0, 4, 128**-0.5))


def test_caches_past_2_31_elements():
    pages, size, kv_heads, hd = 2**20 + 8, 16, 1, 256
    k, v = (torch.empty(pages, size, kv_heads, hd, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    table = ints([pages - 1, 2**19 + 1, pages - 5, 3])
    small = cache("bf16", 4, size, kv_heads, hd)
    for plane, values in zip((k, v), small, strict=True):
        plane[table.long()] = values
    q = normal(seeded(6), torch.bfloat16, 4, 8, hd)
    lists = ints([[3, 0, 9, 14]] * 4)
    out = torch.full_like(q, NAN)
    pointers = [one.data_ptr() for one in (q, k, v, table, lists, out)]
    host.qsa_prefill_attn(*pointers, 4, 60, 4, 4, size, 8, 1, hd, hd**-0.5, stream())
    check_attention(out, reference.prefill_attn(q, *small, ints([0, 1, 2, 3]), lists, 60, 4, hd**-0.5))
    sel = ints([0, 17, 40, 63])
    outs = [torch.full((4, 1, hd), NAN, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    pointers = [one.data_ptr() for one in (k, v, table, sel, *outs)]
    host.qsa_gather(*pointers, 4, size, kv_heads, hd, stream())
    for found, values in zip(outs, small, strict=True):
        assert torch.equal(bits(found), bits(values.flatten(0, 1)[sel.long()]))


# All together.


def test_nothing_to_do_touches_nothing():
    norm = 128, 64, THETA, EPS, 0
    host.qsa_block_pool(0, 0, 0, 7, 0, 4, *norm)
    host.qsa_qprep(0, 0, 0, 0, 128, 64, 9, THETA, EPS, 0)
    host.qsa_qprep_rows(0, 0, 0, 0, 5, 640, 4, *norm)
    host.qsa_score(0, 0, 0, 0, 4, 128, 0)
    host.qsa_gather(0, 0, 0, 0, 0, 0, 0, 16, 2, 256, 0)
    host.qsa_score_rows(0, 0, 0, 0, 9, 5, 16, 4, 4, 128, 0)
    host.qsa_score_rows(0, 0, 0, 9, 0, 5, 16, 4, 4, 128, 0)
    host.qsa_score_rows_tc(0, 0, 0, 0, 9, 5, 16, 4, 0)
    host.qsa_prefill_attn(0, 0, 0, 0, 0, 0, 0, 5, 512, 4, 16, 24, 2, 256, 0.0625, 0)


class Chain:
    """A prefill of 64 rows, one operation after another, on memory of its own."""

    ROWS, PAST, TOPK = 64, 448, 32

    def __init__(self) -> None:
        random, kind = seeded(21), torch.bfloat16
        length = self.PAST + self.ROWS
        self.raw = normal(random, kind, length, 128)
        self.qk = normal(random, kind, self.ROWS, 640)
        self.weight = 0.1 * normal(random, kind, 128)
        self.q = normal(random, kind, self.ROWS, 12, 256)
        self.k, self.v = cache("bf16", length // 16, 16, 1, 256)
        self.table = page_table(length // 16, random)
        self.keys = torch.empty(length // 4, 128, dtype=kind, device=DEVICE)
        self.prepared = torch.empty(self.ROWS, 4, 128, device=DEVICE)
        self.scores = torch.empty(self.ROWS, length // 4, device=DEVICE)
        self.lists = torch.empty(self.ROWS, self.TOPK, dtype=torch.int32, device=DEVICE)
        self.found = torch.zeros(self.ROWS, self.TOPK, dtype=torch.int64, device=DEVICE)
        self.out = torch.empty_like(self.q)
        self.decode_scores = torch.empty(length // 4, device=DEVICE)
        self.written = self.keys, self.prepared, self.scores, self.out, self.decode_scores

    def poison(self) -> None:
        for one in self.written:
            one.fill_(NAN)

    def run(self) -> None:
        raw, qk, weight, q, k, v, table, keys, prepared, scores, lists, out, single = (
            one.data_ptr()
            for one in (
                *(self.raw, self.qk, self.weight, self.q, self.k, self.v, self.table, self.keys, self.prepared),
                *(self.scores, self.lists, self.out, self.decode_scores),
            )
        )
        blocks = len(self.keys)
        norm = 128, 64, THETA, EPS, stream()
        host.qsa_block_pool(raw, weight, keys, 0, blocks, 4, *norm)
        host.qsa_qprep_rows(qk, weight, prepared, self.ROWS, self.PAST, 640, 4, *norm)
        host.qsa_score_rows_tc(prepared, keys, scores, self.ROWS, blocks, self.PAST, blocks, 4, stream())
        torch.topk(self.scores, self.TOPK, out=(torch.empty_like(self.scores[:, : self.TOPK]), self.found))
        self.lists.copy_(self.found)
        sizes = self.ROWS, self.PAST, self.TOPK, 4, 16, 12, 1, 256
        host.qsa_prefill_attn(q, k, v, table, lists, out, *sizes, 0.0625, stream())
        host.qsa_score(prepared, keys, single, blocks, 4, 128, stream())


def test_a_captured_chain_replays_to_the_bit():
    chain = Chain()
    host.preflight("bf16")
    chain.poison()
    chain.run()
    want = [bits(one).clone() for one in chain.written]
    expected = reference.prefill_attn(chain.q, chain.k, chain.v, chain.table, chain.lists, chain.PAST, 4, 0.0625)
    check_attention(chain.out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for _ in range(3):
        chain.poison()
        graph.replay()
        assert all(torch.equal(bits(one), kept) for one, kept in zip(chain.written, want, strict=True))
