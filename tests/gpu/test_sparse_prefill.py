"""Sparse prefill against the reference, on everything a list, a length or a layout may be."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DTYPES, GROUPS, Output, Prefill, ints, normal, prefill, seeded, token_lists
from torch.nn.functional import scaled_dot_product_attention

from qsa_cute.runners import SparsePrefillParams, SparsePrefillRunner


def check(case: Prefill, out: Output) -> None:
    out.check(*case.reference())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype, head_dim, group) -> None:
    case = prefill(dtype, head_dim, group)
    check(case, case.run())


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_any_number_of_kv_heads(kv_heads) -> None:
    case = prefill(kv_heads=kv_heads, group=2, lengths=(300, 0, 77))
    check(case, case.run())


@pytest.mark.parametrize("width", [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512, 2048, 8192])
def test_any_width_of_the_list(width) -> None:
    case = prefill(width=width, lengths=(9000, 5, 200), rows=8)
    check(case, case.run())


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129, 2047, 2048, 2049, 2051, 2052])
def test_the_first_rows_of_a_sequence(length) -> None:
    """A whole short prefill: row r lists all of its r + 1 tokens."""
    case = prefill(lengths=(length,), rows=1)
    rows = min(length, 64)
    generator = seeded(length)
    case.q = normal(generator, torch.bfloat16, 1, rows, 24, 256)
    case.k, case.v = (normal(generator, torch.bfloat16, 1, length, 2, 256) for _ in range(2))
    ids = torch.arange(2051, device="cuda").expand(1, rows, -1).int()
    case.indices = torch.where(ids < torch.arange(1, rows + 1, device="cuda")[:, None], ids, -1)
    case.query_starts = None
    check(case, case.run())


def test_rows_past_the_length_are_zeros_whatever_they_list() -> None:
    case = prefill(lengths=(5, 0), rows=16)
    case.query_starts = None
    case.q = normal(seeded(1), torch.bfloat16, 2, 16, 24, 256)
    case.k, case.v = (normal(seeded(seed), torch.bfloat16, 2, 5, 2, 256) for seed in (2, 3))
    case.indices = torch.zeros_like(case.indices)
    out = case.run()
    check(case, out)
    assert (out.o.tensor[0, 5:] == 0).all()
    assert (out.o.tensor[1] == 0).all()


def test_ids_end_at_the_rows_of_k() -> None:
    """A context length longer than K and V: no id reaches past them."""
    case = prefill(lengths=(100,), rows=4)
    case.context_lengths = ints([1000])
    case.k, case.v = (normal(seeded(seed), torch.bfloat16, 1, 100, 2, 256) for seed in (2, 3))
    case.q = normal(seeded(4), torch.bfloat16, 1, 4, 24, 256)
    case.indices = (torch.arange(2051, device="cuda") % 200).expand(1, 4, -1).int().contiguous()
    check(case, case.run())


def test_without_lse() -> None:
    case = prefill(lengths=(300, 40))
    out = case.run(lse=None)
    assert out.lse.tensor.isnan().all()
    torch.testing.assert_close(out.o.tensor, case.run().o.tensor, rtol=0, atol=0)


def test_strided_tensors() -> None:
    """Q and O in wider rows, K and V interleaved per token, lists in wider rows: the same bits as contiguous."""
    case = prefill(lengths=(500, 60, 0))
    want = case.run()
    batch, rows, heads, dim = case.q.shape
    fused = torch.full((batch, rows, heads + 4, dim), torch.nan, dtype=case.q.dtype, device="cuda")
    fused[:, :, :heads] = case.q
    kv = torch.stack([case.k, case.v], 3)
    lists = torch.full((batch, rows, 2060), 7, dtype=torch.int32, device="cuda")
    lists[..., :2051] = case.indices
    wide = torch.full((batch, rows, heads + 2, dim), 3.0, dtype=case.q.dtype, device="cuda")
    lse = torch.empty(batch, rows, heads, device="cuda")
    params = SparsePrefillParams.from_tensors(
        fused[:, :, :heads],
        kv[:, :, :, 0],
        kv[:, :, :, 1],
        wide[:, :, 1:-1],
        lists[..., :2051],
        case.context_lengths,
        attention_scale=case.scale,
        query_starts=case.query_starts,
        lse=lse,
    )
    SparsePrefillRunner.run("bf16", params)
    assert torch.equal(wide[:, :, 1:-1], want.o.tensor)
    assert torch.equal(lse, want.lse.tensor)
    assert (wide[:, :, [0, -1]] == 3.0).all()


def test_more_rows_than_a_grid_has_in_y() -> None:
    rows = 70_000
    generator = seeded(5)
    q = normal(generator, torch.bfloat16, 1, rows, 2, 128)
    k, v = (normal(generator, torch.bfloat16, 1, rows, 2, 128) for _ in range(2))
    ids = torch.arange(rows, device="cuda")[:, None] - torch.tensor([0, 7, 300], device="cuda")
    case = Prefill(q, k, v, ids[None].int().clamp_min(-1), ints([rows]), None, 128**-0.5)
    check(case, case.run())


@pytest.mark.parametrize("plane", ["k", "v"])
def test_offsets_past_2_to_the_31(plane) -> None:
    """Rows of K or V spread over more than 2^31 elements."""
    tokens, wide = 66, 1 << 25
    case = prefill(lengths=(tokens,), rows=8)
    whole = torch.empty(tokens * wide, dtype=torch.bfloat16, device="cuda")
    spread = whole.as_strided((1, tokens, 2, 256), (0, wide, 256, 1))
    spread.copy_(getattr(case, plane))
    setattr(case, plane, spread)
    check(case, case.run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [256, 128])
def test_as_exact_as_pytorch(dtype, head_dim) -> None:
    """Mean error against FP32 at most 1.5 times that of PyTorch's attention in the same type."""
    rows, tokens = 64, 4096
    generator = seeded(9)
    q = normal(generator, DTYPES[dtype], 1, rows, 24, head_dim)
    k, v = (normal(generator, DTYPES[dtype], 1, tokens, 2, head_dim) for _ in range(2))
    ids = torch.stack([torch.randperm(tokens, generator=generator, device="cuda")[:2051] for _ in range(rows)])
    case = Prefill(q, k, v, ids[None].int(), ints([tokens]), ints([tokens - rows]), head_dim**-0.5)
    want, _ = case.reference()
    gathered = [plane[0][ids].transpose(1, 2).repeat_interleave(12, 1) for plane in (k, v)]
    theirs = scaled_dot_product_attention(q[0][:, :, None], *gathered, scale=case.scale)[:, :, 0]
    error = (case.run().o.tensor.float() - want).abs().mean()
    assert error <= 1.5 * (theirs[None].float() - want).abs().mean()


def test_large_scores_do_not_overflow() -> None:
    """Scores of +-thousands, rising and falling along the list, so that every rescaling of the maximum happens."""
    case = prefill(lengths=(3000,), rows=8)
    q = normal(seeded(3), torch.bfloat16, *case.q.shape)
    ramp = torch.linspace(-3, 3, 3000, device="cuda").bfloat16()
    case.q = q.abs()
    case.k = ramp[None, :, None, None].expand(1, -1, 2, 256).contiguous()
    case.v = normal(seeded(4), torch.bfloat16, 1, 3000, 2, 256)
    up = torch.arange(949, 3000, device="cuda")
    case.indices = torch.stack([up, up.flip(0)] * 4)[None].int().contiguous()
    case.query_starts = None
    case.scale = 4.0
    out = case.run()
    want, want_lse = case.reference()
    assert (out.o.tensor.float() - want).abs().max() <= 5e-2
    torch.testing.assert_close(out.lse.tensor, want_lse, rtol=1e-4, atol=1e-2)


def test_two_runs_give_the_same_bits() -> None:
    case = prefill()
    first = case.run().bits()
    assert all(torch.equal(case.run().bits(), first) for _ in range(5))


def test_rows_do_not_depend_on_their_batch() -> None:
    """One row alone gives the bits it gives among the others."""
    case = prefill()
    whole = case.run()
    for b, r in ((7, 0), (4, 5), (3, 1)):
        alone = Prefill(
            case.q[b : b + 1, r : r + 1],
            case.k[b : b + 1],
            case.v[b : b + 1],
            case.indices[b : b + 1, r : r + 1],
            case.context_lengths[b : b + 1],
            case.query_starts[b : b + 1] + r,
            case.scale,
        )
        assert torch.equal(alone.run().o.tensor[0, 0], whole.o.tensor[b, r])


def test_an_empty_batch() -> None:
    case = prefill(lengths=(10, 20))
    case.q = case.q[:, :0]
    case.indices = case.indices[:, :0]
    case.run()


def test_lse_merges_parts_of_a_context() -> None:
    """Two ranks, each with half of a list, give the whole row."""
    case = prefill(lengths=(3000,), rows=8)
    want, want_lse = case.reference()
    parts = []
    for rank in range(2):
        half = Prefill(**vars(case))
        half.indices = torch.where((case.indices >= 0) & (case.indices % 2 == rank), case.indices, -1)
        parts.append(half.run())
    lses = torch.stack([part.lse.tensor for part in parts])
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - total).nan_to_num(0.0)
    merged = sum(weight[..., None] * part.o.tensor.float() for weight, part in zip(weights, parts, strict=True))
    assert (merged - want).abs().max() <= 2e-2
    finite = want_lse.isfinite()
    assert (total - want_lse)[finite].abs().max() <= 4e-3


def test_ragged_lists_of_one_batch() -> None:
    """22 sequences of unequal length, every kind of list."""
    lengths = tuple(range(0, 2200, 100))
    case = prefill(lengths=lengths, rows=8, seed=11)
    case.indices = token_lists(lengths, 8, 2051, 12)
    case.k, case.v = (normal(seeded(seed), torch.bfloat16, *case.k.shape) for seed in (13, 14))
    check(case, case.run())
