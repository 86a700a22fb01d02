"""Prefill that shares its gather, against the reference: lists that share much, little or nothing, and odd ones.

A tile whose union does not pay, or cannot say what its rows want, takes the row path. So each test also reads in the
workspace which path its tiles took: what is meant to test the union must have been one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from attention_cases import ATOL, DTYPES, Output, ints, seeded
from union_cases import (
    GAIN,
    LSE_ATOL,
    Shared,
    Space,
    attend,
    check,
    check_odd,
    check_shared,
    drifting,
    listed,
    shared,
    with_blocks,
)

from qsa_cute import union_layout
from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.reference import attention as reference
from qsa_cute.runners import SparsePrefillParams, SparsePrefillRunner, union, union_paged

KINDS = ("padded", "counted", "blocks")
HEADS = ((1, 2), (3, 1), (5, 2), (6, 1), (12, 1), (12, 3), (16, 2))  # heads a group, KV heads
BAD_TOKENS = (-(2**31), -2, 2**31 - 1, 1 << 24)
BAD_BLOCKS = (-(2**31), -2, 2**31 - 1, 1 << 24, 1 << 29, 1 << 30)


@pytest.fixture(autouse=True)
def pairs(monkeypatch, request):
    """Tiles of 128 pairs however few the rows are; a test may ask for others by this parameter."""
    caches = (union_layout.tile_pairs, union_paged._sizes, union_paged._workspace)
    monkeypatch.setattr(union_layout, "LEAST_PAIRS", getattr(request, "param", union_layout.PAIRS))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(autouse=True, params=["alone", "together"])
def prepare(monkeypatch, request):
    """By the pre-kernel that has an SM a tile, and by the one of which several share an SM, however many there are."""
    if request.param == "together":
        monkeypatch.setattr(union, "_PREPARE_ALONE", union._PREPARE)


# What rows share.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rho", [0.9, 0.99, 0.999])
def test_rows_that_share_much(rho, kind) -> None:
    check_shared(shared(rho=rho, rows=203), kind)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.999])
def test_full_lists(rho) -> None:
    """512 blocks of 8192 tokens: both ways, and the rows' kernel says the same."""
    case = shared(rho=rho, lengths=(8192,), rows=64, top=512)
    out, space = attend(case)
    check(case, out, space)
    rows = case.run(algorithm="rows")
    assert (out.o.tensor.float() - rows.o.tensor.float()).abs().max() <= ATOL
    assert (out.lse.tensor - rows.lse.tensor).abs().max() <= LSE_ATOL


@pytest.mark.parametrize("kind", KINDS)
def test_identical_rows(kind) -> None:
    case = shared(lengths=(4096,), rows=45, top=128)
    check_shared(with_blocks(case, case.blocks[:, :1].expand(-1, 45, -1).contiguous()), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_share_nothing(kind) -> None:
    case = shared(lengths=(8192,), rows=45, top=128)
    row, place = torch.arange(45, device=case.q.device), torch.arange(128, device=case.q.device)
    case = with_blocks(case, (row[:, None] % 15 + 15 * place).int()[None].contiguous())
    check_shared(case, kind)


def test_tiles_of_both_kinds_side_by_side() -> None:
    """The first half of the rows shares all, the second nothing; rows at the border have heads in both."""
    case = shared(lengths=(8192,), rows=64, top=128)
    blocks = case.blocks.clone()
    blocks[:, :32] = blocks[:, :1]
    row, place = torch.arange(32, device=case.q.device), torch.arange(128, device=case.q.device)
    blocks[:, 32:] = (row[:, None] % 15 + 15 * place).int()
    check_shared(with_blocks(case, blocks))


@pytest.mark.parametrize("pairs", [32, 64, 96, 100], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_small_tiles(kind, pairs) -> None:
    """Few rows are cut in tiles of fewer pairs; one of 64 leaves the second warpgroup without rows."""
    case = shared(rows=60, lengths=(2048, 901))
    check_shared(case, kind)
    case = with_blocks(replace(case, blocks=case.blocks.clone()), case.blocks)
    case.blocks[0, 30, 5] = case.blocks[0, 30, 6]
    check_odd(with_blocks(case, case.blocks), kind)


# Shapes.


@pytest.mark.parametrize(("group", "kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_group(dtype, head_dim, group, kv_heads) -> None:
    case = shared(dtype, head_dim, group, kv_heads, lengths=(2048, 701), rows=60, past=3)
    check_shared(case, KINDS[group % 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 130, 1000])
def test_the_first_rows_of_a_sequence(length, kind) -> None:
    """A whole short prefill without query starts; row r sees r + 1 tokens."""
    case = shared(lengths=(length,), rows=min(length, 200), top=32)
    case.query_starts = torch.zeros_like(case.query_starts)
    generator = seeded(length)
    blocks = drifting(case.q.shape[1], 0, length, 32, 0.95, generator)[None]
    case = with_blocks(case, blocks)
    case.query_starts = None
    out, space = attend(case, kind)
    check(case, out, space)
    assert not space.rows_path().any(), "took the row path"


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_from_1_to_64(kind) -> None:
    check_shared(shared(lengths=tuple(range(1, 65)), rows=24, top=16, past=5), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_sequences(kind) -> None:
    case = shared(lengths=(900, 33, 50, 1, 2048), rows=50, past=2)
    check_shared(case, kind)


def test_a_sequence_without_tokens() -> None:
    case = shared(lengths=(900, 40), rows=50)
    case.context_lengths = ints([900, 0])
    check_shared(case)


FAR_OFF = (-(2**31), -(2**30) - 1, -5000, -1, 0, 1, 2**30 + 1, 2**31 - 1)


def far_off() -> Shared:
    """Context lengths and starts that no sequence has, each with each: what is live of them is small."""
    each = list(itertools.product((*FAR_OFF, 300), (*FAR_OFF, 270)))
    case = shared(lengths=(300,) * len(each), rows=40, top=16, kv_heads=1)
    case.context_lengths, case.query_starts = ints([n for n, _ in each]), ints([n for _, n in each])
    return with_blocks(case, case.blocks)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_any_context_length_and_start(kind, twice) -> None:
    """By the union, and by the row path, where a duplicate sends a tile."""
    case = far_off()
    if twice:
        case.blocks[:, 5, 3] = case.blocks[:, 5, 4]
        case = with_blocks(case, case.blocks)
    check(case, *attend(case, kind))


def test_any_context_length_and_start_row_by_row() -> None:
    case, out = far_off(), Output.like(far_off().q)
    SparsePrefillRunner.run(case.q.dtype, case.params(out, algorithm="rows"))
    out.check(*case.reference())


def test_ids_end_at_the_rows_of_k() -> None:
    """A context length longer than K and V: no id reaches past them."""
    case = shared(lengths=(1000,), rows=50)
    case.k, case.v = (plane[:, :801].contiguous() for plane in (case.k, case.v))
    check(case, *attend(case))


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_of_262144(kind) -> None:
    check_shared(shared(lengths=(262_144,), rows=30, top=512, rho=0.99), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (3, 1), (6, 1)])
def test_small_groups_of_a_long_context(group, kv_heads, kind) -> None:
    """The bitmaps of a full tile's rows would not fit: tiles have fewer pairs, and fewer rows' masks."""
    case = shared(group=group, kv_heads=kv_heads, lengths=(262_144, 4000), rows=60, top=512, rho=0.99)
    most = union_layout.fitting_pairs(group, 512, 262_144, 80)
    assert union_layout.mask_rows(group, most) < union_layout.mask_rows(group)
    out, space = attend(case, kind)
    check(case, out, space)
    assert len(space.part("union_counts")) == 2 * -(-60 * group // most)
    assert not space.rows_path().any(), "took the row path"


@pytest.mark.parametrize("head_dim", [256, 128])
def test_more_tiles_than_processors(head_dim) -> None:
    """Blocks go from tile to tile: the ring of one runs on into the next."""
    check_shared(shared(head_dim=head_dim, lengths=(4096, 3001), rows=1500, rho=0.9), "blocks")


def test_strided_tensors() -> None:
    """Q and O in wider rows, K and V interleaved per token, lists in wider rows: the same bits as contiguous."""
    case = shared(lengths=(900, 300), rows=50, kv_heads=2)
    want, _ = attend(case)
    batch, rows, heads, dim = case.q.shape
    fused = torch.full((batch, rows, heads + 4, dim), torch.nan, dtype=case.q.dtype, device=case.q.device)
    fused[:, :, :heads] = case.q
    kv = torch.stack([case.k, case.v], 3)
    width = case.indices.shape[-1]
    lists = torch.full((batch, rows, width + 6), 7, dtype=torch.int32, device=case.q.device)
    lists[..., :width] = case.indices
    wide = torch.full((batch, rows, heads + 2, dim), 3.0, dtype=case.q.dtype, device=case.q.device)
    lse = torch.empty(batch, rows, heads, device=case.q.device)
    params = SparsePrefillParams.from_tensors(
        fused[:, :, :heads],
        kv[:, :, :, 0],
        kv[:, :, :, 1],
        wide[:, :, 1:-1],
        lists[..., :width],
        case.context_lengths,
        attention_scale=case.scale,
        query_starts=case.query_starts,
        lse=lse,
        workspace=Space.of(case, "padded").bytes.tensor,
        algorithm="union",
    )
    SparsePrefillRunner.run(case.q.dtype, params)
    assert torch.equal(wide[:, :, 1:-1], want.o.tensor)
    assert torch.equal(lse, want.lse.tensor)
    assert (wide[:, :, [0, -1]] == 3.0).all()


def test_without_lse() -> None:
    case = shared()
    want, _ = attend(case)
    out, _ = attend(case, lse=None)
    assert out.lse.tensor.isnan().all()
    assert torch.equal(out.o.tensor, want.o.tensor)


# Odd lists.


def edited(case: Shared, row: int, ids: object) -> Shared:
    """With another padded list for one row."""
    indices = case.indices.clone()
    ids = torch.as_tensor(ids, dtype=torch.int32, device=indices.device)
    indices[0, row] = -1
    indices[0, row, : len(ids)] = ids
    return replace(case, indices=indices)


@pytest.mark.parametrize("kind", ["padded", "counted"])
def test_empty_rows(kind) -> None:
    case = shared()
    for row in (0, 41, 42, 99):
        case = edited(case, row, [])
    check_shared(case, kind)


def test_rows_of_one_token() -> None:
    case = shared()
    for row in range(10, 60, 7):
        case = edited(case, row, [row * 31])
    check_shared(case)


def test_nothing_but_empty_rows() -> None:
    case = shared(lengths=(300,), rows=50)
    check_shared(replace(case, indices=torch.full_like(case.indices, -1)))


@pytest.mark.parametrize("kind", ["padded", "counted"])
def test_duplicates_count_twice(kind) -> None:
    """Of a whole block, of a token, and of the open block's: their tiles go row by row."""
    case = shared()
    row = case.indices[0].tolist()
    case = edited(case, 30, [*row[30][4:8], *row[30]][: len(row[30])])
    case = edited(case, 60, [*row[60][:1], *row[60]][: len(row[60])])
    check_odd(case, kind)


def test_block_ids_twice() -> None:
    case = shared()
    blocks = case.blocks.clone()
    blocks[0, 30, 5] = blocks[0, 30, 6]
    blocks[0, 60, 7] = (case.query_starts[0] + 61) // BLOCK_TOKENS  # the open block, which counts by itself already
    check_odd(with_blocks(case, blocks), "blocks")


def test_few_holes_stay_a_union() -> None:
    case = shared(rho=0.99, rows=90)
    holes = torch.rand(case.indices.shape, generator=seeded(1), device=case.q.device) < 5e-4
    check_shared(replace(case, indices=torch.where(holes, -1, case.indices)))


def test_many_holes_take_the_row_path() -> None:
    case = shared(rows=90)
    holes = torch.rand(case.indices.shape, generator=seeded(1), device=case.q.device) < 0.3
    holes[:, :45] = False
    check_odd(replace(case, indices=torch.where(holes, -1, case.indices)))


def test_tokens_in_any_order() -> None:
    """Lists whose blocks are torn apart."""
    case = shared(rows=90)
    order = torch.rand(case.indices.shape, generator=seeded(1), device=case.q.device).argsort(-1)
    order[:, :45] = torch.arange(order.shape[-1], device=order.device)
    check_odd(replace(case, indices=case.indices.gather(-1, order)))


def test_bad_ids_do_not_count() -> None:
    case = shared(lengths=(2047,), rows=60)
    indices = case.indices.clone()
    for i, bad in enumerate((*BAD_TOKENS, 2047, 2048, 2047 + 127)):
        indices[0, 5 * i, 9 + 4 * i] = bad
    check(case := replace(case, indices=indices), *attend(case))


@pytest.mark.parametrize("twice", [False, True])
def test_bad_block_ids_do_not_count(twice) -> None:
    """By the union, and by the row path, where a duplicate sends a tile."""
    case = shared(lengths=(2047,), rows=60)
    blocks = case.blocks.clone()
    for i, bad in enumerate((*BAD_BLOCKS, 512, 513)):
        blocks[0, 3 * i, 2 + i] = bad
        if twice:
            blocks[0, 3 * i, 20] = blocks[0, 3 * i, 21]
    (check_odd if twice else check_shared)(with_blocks(case, blocks), "blocks")


def test_counts_out_of_range() -> None:
    """A count past the width is the width, a negative one none."""
    case = shared(rows=40, top=16)
    given = case.selection("counted").clone()
    width = given.shape[-1] - 1
    given[0, 3, -1], given[0, 9, -1] = -7, width + 1000
    want = replace(case, indices=case.indices.clone())
    want.indices[0, 3] = -1
    want.indices[0, 9] = given[0, 9, :-1]
    space = Space.of(case, "counted")
    out = Output.like(case.q)
    params = replace(case, indices=given).params(
        out, index_kind="counted", workspace=space.bytes.tensor, algorithm="union"
    )
    SparsePrefillRunner.run(case.q.dtype, params)
    check(want, out, space)


# Values.


@pytest.mark.parametrize("pairs", [128, 100, 32], indirect=True)
def test_nothing_but_the_listed_blocks_is_read(pairs) -> None:
    """NaN in every block that no row lists, past the lengths and in dead queries: still unions."""
    case = shared(lengths=(2048, 901), rows=90, past=3)
    whole = torch.nn.functional.pad(listed(case) > 0, (0, -case.k.shape[1] % BLOCK_TOKENS))
    whole = whole.unflatten(1, (-1, BLOCK_TOKENS)).any(-1).repeat_interleave(BLOCK_TOKENS, 1)[:, : case.k.shape[1]]
    token = torch.arange(case.k.shape[1], device=case.q.device)
    kept = whole & (token < case.context_lengths[:, None])
    for plane in (case.k, case.v):
        plane[~kept] = torch.nan
    case.q[:, -3:] = torch.nan
    check_shared(case)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_listed_tokens_counts(kind) -> None:
    """NaN in every token that no row lists, beside listed ones of the same block too."""
    case = shared(lengths=(2048, 901), rows=90, past=3)
    for row in range(0, 90, 9):
        case = edited(case, row, case.indices[0, row, 2:]) if kind != "blocks" else case
    unlisted = listed(case) == 0
    for plane in (case.k, case.v):
        plane[unlisted] = torch.nan
    check(case, *attend(case, kind))


@pytest.mark.parametrize(("plane", "value"), [("k", torch.nan), ("v", torch.nan), ("v", torch.inf)])
def test_only_the_row_that_lists_a_token_sees_its_value(plane, value) -> None:
    """A token in one row's list alone is not finite: all other rows of its tile stay right."""
    case = shared(rows=45)
    token = int((listed(case)[0] == 1).nonzero()[0])
    owner = int((case.indices[0] == token).any(-1).nonzero()[0])
    others = torch.arange(45, device=case.q.device) != owner
    want, want_lse = case.reference()
    getattr(case, plane)[0, token] = value
    out, space = attend(case)
    assert not out.o.tensor[0, owner].isfinite().all(), "the row itself does not show it"
    assert (out.o.tensor.float() - want)[0, others].abs().max() <= ATOL  # false for NaN
    assert (out.lse.tensor - want_lse)[0, others].abs().max() <= LSE_ATOL
    assert space.rows_path().any() or plane == "k", "a V that is not finite must send its tile to the row path"


def test_large_scores_do_not_overflow() -> None:
    """Scores of +-thousands that rise along the context, fall, and do both: every rescaling of the maximum happens."""
    case = shared(lengths=(3000,), rows=60, top=512, rho=0.99)
    ramp = torch.linspace(-3, 3, 3000, device=case.q.device)
    wave = 3 * torch.sin(torch.arange(3000, device=case.q.device) / 50)
    case.q = case.q.abs() / GAIN
    case.scale = 4.0
    for scores in (ramp, -ramp, wave):
        case.k = scores.to(case.k.dtype)[None, :, None, None].expand(1, -1, 2, 256).contiguous()
        out, space = attend(case, "blocks")
        want, want_lse = case.reference()
        assert (out.o.tensor.float() - want).abs().max() <= 5e-2
        torch.testing.assert_close(out.lse.tensor, want_lse, rtol=1e-4, atol=1e-2)
        assert not space.rows_path().any()


def test_the_masks_matter() -> None:
    """Control: attending to a tile's whole union, masks ignored, is far outside what the tests tolerate."""
    case = shared(rows=10, rho=0.9)  # 120 pairs: one tile
    out, space = attend(case)
    check(case, out, space)
    union = (listed(case)[0] > 0).nonzero().flatten().int()
    unmasked = union.expand(1, 10, -1).contiguous()
    q, k, v, _, lengths = case.inputs
    wrong, wrong_lse = reference.sparse_prefill(q, k, v, unmasked, lengths, case.scale, case.query_starts)
    assert (out.o.tensor.float() - wrong).abs().amax((2, 3)).min() > 2 * ATOL
    assert (out.lse.tensor - wrong_lse).abs().min() > 10 * LSE_ATOL


# Repetition, workspaces, graphs, choice.


def garbage(space: Space) -> Iterator[str]:
    cells = space.bytes.tensor
    for byte in (0x00, 0x7F, 0xFF):
        cells.fill_(byte)
        yield hex(byte)
    cells.random_(generator=seeded(3))
    yield "random"


@pytest.mark.parametrize("kind", KINDS)
def test_the_workspace_may_hold_anything(kind) -> None:
    case = shared(lengths=(2048, 901), rows=100)
    case = replace(case, indices=case.indices.clone(), blocks=case.blocks.clone())
    case.blocks[0, 30, 5] = case.blocks[0, 30, 6]  # some tile of each path
    case = with_blocks(case, case.blocks)
    first = attend(case, kind)[0].bits()
    space = Space.of(case, kind)
    for what in garbage(space):
        assert torch.equal(attend(case, kind, space=space)[0].bits(), first), what
        space.bytes.check()


def test_two_runs_give_the_same_bits() -> None:
    case = shared(lengths=(4096, 3001), rows=500, rho=0.9)
    space = Space.of(case, "blocks")
    first = attend(case, "blocks", space=space)[0].bits()
    assert all(torch.equal(attend(case, "blocks", space=space)[0].bits(), first) for _ in range(10))


def test_a_thread_that_has_no_context() -> None:
    """Its launch encodes tensor maps, which the driver refuses where no context is current."""
    case = shared(rows=60)
    want, _ = attend(case)
    out, space = Output.like(case.q), Space.of(case, "padded")
    params = case.params(out, algorithm="union", workspace=space.bytes.tensor)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as other:
        other.submit(SparsePrefillRunner.run, case.q.dtype, params).result()
    torch.cuda.synchronize()
    assert torch.equal(out.bits(), want.bits())


def test_kinds_give_the_same_bits() -> None:
    """A list and the block ids that stand for it are one selection."""
    case = shared(lengths=(2048, 901), rows=100)
    first = attend(case, "padded")[0].bits()
    assert all(torch.equal(attend(case, kind)[0].bits(), first) for kind in KINDS[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_replays_with_changing_inputs(kind) -> None:
    """One graph over fixed tensors, three sets of inputs in turn; every replay gives the bits of a plain run."""
    cases = [shared(lengths=(2048, 901), rows=100, rho=rho, seed=seed) for seed, rho in enumerate((0.9, 0.99, 0.0))]
    cases[1].blocks[0, 30, 5] = cases[1].blocks[0, 30, 6]
    cases[1] = with_blocks(cases[1], cases[1].blocks)
    wanted = [attend(case, kind)[0].bits() for case in cases]
    fixed, given = shared(lengths=(2048, 901), rows=100, seed=9), [case.selection(kind) for case in cases]
    out, space, ids = Output.like(fixed.q), Space.of(fixed, kind), fixed.selection(kind)
    more = {"algorithm": "union", "index_kind": kind, "workspace": space.bytes.tensor}
    captured = replace(fixed, indices=ids)
    SparsePrefillRunner.run(fixed.q.dtype, captured.params(out, **more))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        SparsePrefillRunner.run(fixed.q.dtype, params := captured.params(out, **more))
    wrong = torch.zeros((), dtype=torch.int64, device=fixed.q.device)
    for i in range(60):
        case = cases[i % 3]
        for name in ("q", "k", "v", "context_lengths", "query_starts"):
            getattr(fixed, name).copy_(getattr(case, name))
        ids.copy_(given[i % 3])
        if i % 10 == 0:
            space.bytes.tensor.fill_(0xFF)
        graph.replay()
        wrong += (out.bits() != wanted[i % 3]).any()
    assert wrong.item() == 0
    space.bytes.check()
    assert params.shares


@pytest.mark.parametrize(("rows", "takes"), [(8, False), (300, True)])
def test_many_rows_share_by_default(rows, takes) -> None:
    """With a workspace and no algorithm named, the union is taken from some number of rows on."""
    case = shared(rows=rows)
    space = Space.of(case, "padded")
    out = case.run(workspace=space.bytes.tensor)
    out.check(*case.reference())
    assert (space.bytes.tensor == 0xFF).all().item() is not takes
    assert case.params(Output.like(case.q)).shares is False
