"""Sparse decode against the reference: both algorithms, every split count, everything a page table may hold."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BLOCK_KINDS, DTYPES, GROUPS, Decode, Output, decode, ints, normal, seeded
from torch.nn.functional import scaled_dot_product_attention

from qsa_cute.errors import ArgumentError
from qsa_cute.runners import SparseDecodeRunner

ALGORITHMS = ("tma", "split_kv")
SPLITS = [("tma", n) for n in range(1, 17)] + [("split_kv", n) for n in range(1, 9)]

both = pytest.mark.parametrize("algorithm", ALGORITHMS)


def check(case: Decode, out: Output) -> None:
    out.check(*case.reference())


@both
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype, head_dim, group, algorithm) -> None:
    case = decode(dtype, head_dim, group)
    check(case, case.run(algorithm))


@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize(("algorithm", "splits"), SPLITS)
def test_any_number_of_splits(algorithm, splits, head_dim) -> None:
    case = decode(head_dim=head_dim)
    check(case, case.run(algorithm, num_splits=splits))


@both
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_of_blocks(dtype, head_dim, kind, algorithm) -> None:
    """Whole blocks and what is nearly one, at each place in a page, with pages missing."""
    lengths = (0, 1, 3, 4, 5, 7, 130, 2048, 2051, 5000)
    case = decode(dtype, head_dim, lengths=lengths, query_len=2, kinds=(kind, "blocks"))
    check(case, case.run(algorithm))


@pytest.mark.parametrize("splits", [1, 2, 3, 9, 16])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("head_dim", [256, 128])
def test_boxes_with_any_number_of_splits(head_dim, kind, splits) -> None:
    """Lists that end anywhere in a stage and in a step: what lies past the end is not even zeros."""
    lengths = tuple(range(1900, 1900 + 37 * 9, 37))
    case = decode(head_dim=head_dim, lengths=lengths, query_len=1, broken_pages=False, kinds=(kind,))
    first = case.run("tma", num_splits=splits)
    check(case, first)
    assert torch.equal(case.run("tma", num_splits=splits).bits(), first.bits())


@pytest.mark.parametrize("pages", [1023, 1024, 1025])
def test_boxes_with_page_tables_in_and_out_of_shared_memory(pages) -> None:
    case = decode(lengths=(2100, 700), query_len=1, broken_pages=False, kinds=("mixed",))
    wide = torch.full((2, 2, pages), -1, dtype=torch.int32, device="cuda")
    wide[..., : case.page_table.shape[2]] = case.page_table
    case.page_table = wide
    check(case, case.run("tma"))


def test_the_default_algorithm_is_boxes() -> None:
    case = decode(lengths=(2052, 77))
    assert torch.equal(case.run(None).bits(), case.run("tma").bits())


def test_a_pool_without_a_tensor_map() -> None:
    """Both KV heads at one place: not by boxes, but by what takes it."""
    case = decode(lengths=(2052, 77))
    case.kv_pool = case.kv_pool[:, :, :1].nan_to_num().expand(*case.kv_pool.shape)
    out = case.run(None)
    check(case, out)
    assert torch.equal(out.bits(), case.run("split_kv").bits())
    with pytest.raises(ArgumentError, match="pages, tokens and heads that lie apart"):
        case.run("tma")


@both
@pytest.mark.parametrize("batch", [1, 2, 8, 22])
def test_unequal_lengths(batch, algorithm) -> None:
    """One token a sequence, as hosts call it."""
    lengths = tuple((b * 911 + 2040) % 4000 for b in range(batch))
    case = decode(lengths=lengths, query_len=1, broken_pages=False, seed=batch)
    check(case, case.run(algorithm))


@both
@pytest.mark.parametrize("query_len", [2, 3, 5])
def test_several_new_tokens(query_len, algorithm) -> None:
    case = decode(lengths=(2500, 0, 9, 140), query_len=query_len)
    check(case, case.run(algorithm))


@both
@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 2048, 8192])
def test_any_width_of_the_list(width, algorithm) -> None:
    case = decode(lengths=(9000, 3, 700), width=width)
    check(case, case.run(algorithm))


@both
@pytest.mark.parametrize(("head_dim", "wide"), [(256, 256), (256, 264), (128, 128), (128, 384)])
def test_any_width_of_the_pool(head_dim, wide, algorithm) -> None:
    case = decode(head_dim=head_dim, pool_head_dim=wide, lengths=(700, 130))
    check(case, case.run(algorithm))


@both
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_any_number_of_kv_heads(kv_heads, algorithm) -> None:
    case = decode(kv_heads=kv_heads, group=3, lengths=(700, 0, 130))
    check(case, case.run(algorithm))


@both
@pytest.mark.parametrize("bad", [-1, -(2**31), -2, 2**31 - 1])
def test_no_page_at_all(bad, algorithm) -> None:
    """Every page is unused or foreign: zeros, and nothing is read."""
    case = decode(lengths=(2052, 300))
    case.page_table.fill_(bad)
    case.kv_pool.fill_(torch.nan)
    out = case.run(algorithm)
    check(case, out)
    assert (out.o.tensor == 0).all()


@both
def test_a_length_past_the_page_table(algorithm) -> None:
    """Lengths and ids beyond the table's last page: only mapped tokens count."""
    case = decode(lengths=(900, 300), query_len=2, broken_pages=False)
    pages = case.page_table.shape[2]
    case.kv_pool = normal(seeded(1), torch.bfloat16, *case.kv_pool.shape)
    case.context_lengths = ints([2**31 - 1, pages * 128 + 1])
    ids = torch.arange(2051, device="cuda").expand(2, 2, -1).int().contiguous()
    ids[:, 1] += 2**30
    case.indices = ids
    check(case, case.run(algorithm))


@both
def test_without_lse(algorithm) -> None:
    case = decode(lengths=(300, 40))
    out = case.run(algorithm, lse=None)
    assert out.lse.tensor.isnan().all()
    assert torch.equal(out.o.tensor, case.run(algorithm).o.tensor)


def test_boxes_need_no_workspace() -> None:
    case = decode(lengths=(2100, 40), query_len=1)
    out = Output.like(case.q)
    SparseDecodeRunner.run("bf16", case.params(out, None))
    check(case, out)
    with pytest.raises(ArgumentError, match="partial_o is null"):
        case.params(out, None, algorithm="split_kv")


@both
def test_one_workspace_for_layers_in_turn(algorithm) -> None:
    """Nothing of a layer's launch is left for the next one's, whatever their shapes; nor of an aborted one."""
    cases = [decode(group=group, lengths=lengths) for group in (12, 3) for lengths in ((2052, 0, 5), (128, 2051, 400))]
    shared = cases[0].workspace()
    for case in cases * 2:
        check(case, case.run(algorithm, shared))
    shared.parts["split_counters"].fill_(3)
    check(cases[1], cases[1].run(algorithm, shared))


@both
def test_two_runs_give_the_same_bits(algorithm) -> None:
    case = decode()
    workspace = case.workspace()
    first = case.run(algorithm, workspace).bits()
    for _ in range(20):
        workspace.poison()
        assert torch.equal(case.run(algorithm, workspace).bits(), first)


@both
def test_many_rows(algorithm) -> None:
    """More blocks than fit at once, so that splits of a row arrive in any order."""
    lengths = tuple(500 + 7 * b for b in range(96))
    case = decode(lengths=lengths, query_len=4, head_dim=128, width=700, broken_pages=False)
    splits = 8
    first = case.run(algorithm, num_splits=splits)
    check(case, first)
    assert torch.equal(case.run(algorithm, num_splits=splits).bits(), first.bits())


@both
def test_a_pool_past_2_to_the_31_elements(algorithm) -> None:
    case = decode(lengths=(2100, 300), query_len=2, broken_pages=False)
    page = case.kv_pool[0].numel()
    flat = (2**31 + 2**26) // page
    used = case.kv_pool.shape[0]
    pool = torch.empty(flat, *case.kv_pool.shape[1:], dtype=torch.bfloat16, device="cuda")
    pool[flat - used :] = case.kv_pool
    case.kv_pool = pool
    case.page_table = torch.where(case.page_table >= 0, case.page_table + (flat - used), -1)
    check(case, case.run(algorithm))


@both
def test_strided_tensors(algorithm) -> None:
    """Rows of Q and O inside wider ones, a pool with its heads outside, wider lists: the same bits."""
    case = decode(lengths=(2052, 60, 400), query_len=2)
    want = case.run(algorithm).bits()
    batch, query_len, heads, dim = case.q.shape
    fused = torch.full((batch, query_len, heads + 4, dim), torch.nan, dtype=case.q.dtype, device="cuda")
    fused[:, :, :heads] = case.q
    case.q = fused[:, :, :heads]
    case.kv_pool = case.kv_pool.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    lists = torch.full((batch, query_len, 2060), 7, dtype=torch.int32, device="cuda")
    lists[..., :2051] = case.indices
    case.indices = lists[..., :2051]
    assert torch.equal(case.run(algorithm).bits(), want)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_exact_as_pytorch(dtype, algorithm) -> None:
    """Mean error against FP32 at most 1.5 times that of PyTorch's attention in the same type."""
    batch, tokens = 16, 4096
    case = decode(dtype, lengths=(tokens,) * batch, query_len=1, broken_pages=False)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(tokens, generator=generator)[:2051] for _ in range(batch)]).cuda()
    case.indices = ids[:, None].int().contiguous()
    case.kv_pool = normal(seeded(2), DTYPES[dtype], *case.kv_pool.shape)
    want, _ = case.reference()
    table = case.page_table.long()
    gathered = [
        case.kv_pool[table[:, plane].gather(1, ids // 128), ids % 128, :, :256].transpose(1, 2).repeat_interleave(12, 1)
        for plane in (0, 1)
    ]
    theirs = scaled_dot_product_attention(case.q.transpose(1, 2), *gathered, scale=case.scale).transpose(1, 2)
    error = (case.run(algorithm).o.tensor.float() - want).abs().mean()
    assert error <= 1.5 * (theirs.float() - want).abs().mean()


@both
def test_an_empty_batch(algorithm) -> None:
    case = decode(lengths=(10, 20), query_len=1)
    empty = Decode(case.q[:0], case.kv_pool, case.page_table[:0], case.indices[:0], case.context_lengths[:0], 1.0)
    SparseDecodeRunner.run("bf16", empty.params(Output.like(empty.q), None))


@both
def test_agrees_with_the_other_algorithm_and_with_itself_at_other_splits(algorithm) -> None:
    """Splits change the order of sums only."""
    case = decode(lengths=(2052, 3000, 17), query_len=4)
    want = case.run("split_kv", num_splits=1).o.tensor.float()
    for splits in (2, 8):
        assert (case.run(algorithm, num_splits=splits).o.tensor.float() - want).abs().max() <= 2e-2
