"""The reference against an independent formulation: dense attention with a mask of multiplicities."""

from __future__ import annotations

import pytest
import torch

from qsa_cute.reference import attention as reference

SCALE = 0.3
D = 8


def dense(q, k, v, ids, length):
    """One row: softmax over the whole sequence, each token weighted by how often the list names it."""
    group = q.shape[0] // k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:1], -torch.inf, dtype=torch.float64)
    counts = torch.zeros(k.shape[0], dtype=torch.float64)
    for token in ids.tolist():
        if 0 <= token < min(length, k.shape[0]):
            counts[token] += 1
    named = counts > 0
    if named.any():
        for head in range(q.shape[0]):
            keys, values = k[named, head // group].double(), v[named, head // group].double()
            weights = counts[named] * torch.exp(SCALE * keys @ q[head].double())
            out[head] = weights @ values / weights.sum()
            lse[head] = weights.sum().log()
    return out, lse


def lists(generator, rows, width, length):
    """Holes, padding, ids past the end, far out of range, and duplicates."""
    ids = torch.randint(0, max(length, 1), (rows, width), generator=generator, dtype=torch.int32)
    ids[:, ::3] = -1
    ids[0] = -1
    ids[1, 1:] = -1
    if width > 4:
        ids[2, 4] = ids[2, 1]
    ids[3, :4] = torch.tensor([-(2**31), length, length + 1, 2**31 - 1])[:width]
    return ids


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=1e-9)


class TestPrefill:
    @pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (6, 2), (12, 1)])
    @pytest.mark.parametrize("width", [1, 5, 13])
    @pytest.mark.parametrize("starts", [None, [0, 3, 9]])
    def test_is_dense_attention_over_the_listed_tokens(self, generator, q_heads, kv_heads, width, starts):
        rows, kv_rows, lengths = 5, 11, [11, 4, 10]
        q = normal(generator, 3, rows, q_heads, D)
        k, v = (normal(generator, 3, kv_rows, kv_heads, D) for _ in range(2))
        ids = torch.stack([lists(generator, rows, width, length) for length in lengths])
        query_starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
        context = torch.tensor(lengths, dtype=torch.int32)
        out, lse = reference.sparse_prefill(q, k, v, ids, context, SCALE, query_starts, torch.float64)
        for b, length in enumerate(lengths):
            for r in range(rows):
                live = (starts[b] if starts else 0) + r < length
                o, total = dense(q[b, r], k[b], v[b], ids[b, r] if live else ids[b, r, :0], length)
                close(out[b, r], o)
                close(lse[b, r], total)

    def test_no_valid_entry_is_zeros_and_minus_infinity(self, generator):
        q = normal(generator, 1, 2, 2, D)
        kv = normal(generator, 1, 4, 1, D)
        ids = torch.tensor([[[-1, -1], [4, 7]]], dtype=torch.int32)
        out, lse = reference.sparse_prefill(q, kv, kv, ids, torch.tensor([4]), SCALE)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()

    def test_a_row_past_the_length_reads_nothing(self, generator):
        q = torch.full((1, 3, 2, D), torch.nan)
        q[:, :2] = 1.0
        kv = normal(generator, 1, 3, 1, D)
        ids = torch.zeros(1, 3, 4, dtype=torch.int32)
        out, lse = reference.sparse_prefill(q, kv, kv, ids, torch.tensor([2]), SCALE)
        assert out[0, :2].isfinite().all()
        assert (out[0, 2] == 0).all()
        assert (lse[0, 2] == -torch.inf).all()

    def test_nan_in_tokens_that_are_not_listed_stays_there(self, generator):
        q = normal(generator, 1, 1, 2, D)
        k, v = (normal(generator, 1, 8, 1, D) for _ in range(2))
        ids = torch.tensor([[[1, 3, -1, 6]]], dtype=torch.int32)
        want, _ = reference.sparse_prefill(q, k, v, ids, torch.tensor([6]), SCALE)
        for plane in (k, v):
            plane[:, [0, 2, 4, 5, 6, 7]] = torch.nan
        out, lse = reference.sparse_prefill(q, k, v, ids, torch.tensor([6]), SCALE)
        torch.testing.assert_close(out, want, rtol=0, atol=0)
        assert lse.isfinite().all()

    def test_chunks_do_not_change_the_result(self, generator, monkeypatch):
        q, k = normal(generator, 2, 7, 2, D), normal(generator, 2, 9, 2, D)
        ids = torch.stack([lists(generator, 7, 6, 9) for _ in range(2)])
        args = (q, k, k, ids, torch.tensor([9, 5]), SCALE)
        whole = reference.sparse_prefill(*args)
        monkeypatch.setattr(reference, "_CHUNK_BYTES", 1)
        for found, want in zip(reference.sparse_prefill(*args), whole, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)

    def test_an_empty_list_and_an_empty_batch(self, generator):
        kv = normal(generator, 1, 4, 1, D)
        none = torch.zeros(1, 2, 0, dtype=torch.int32)
        out, lse = reference.sparse_prefill(normal(generator, 1, 2, 2, D), kv, kv, none, torch.tensor([4]), SCALE)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        out, lse = reference.sparse_prefill(kv[:0], kv[:0], kv[:0], none[:0], torch.zeros(0), SCALE)
        assert out.shape == (0, 4, 1, D)
        assert lse.shape == (0, 4, 1)


class TestDecode:
    LENGTHS = (300, 129, 0, 5)
    PAGES = 3

    def pool(self, generator, kv_heads=2, wide=D + 4):
        """A permuted pool, NaN wherever no sequence has a token; returns (pool, table, dense k, dense v)."""
        batch = len(self.LENGTHS)
        flat = 2 * batch * self.PAGES + 2
        pool = torch.full((flat, 128, kv_heads, wide), torch.nan, dtype=torch.float64)
        order = torch.randperm(flat, generator=generator)[: 2 * batch * self.PAGES].view(batch, 2, self.PAGES)
        table = torch.full((batch, 2, self.PAGES), -1, dtype=torch.int32)
        planes = normal(generator, batch, 2, self.PAGES * 128, kv_heads, D)
        for b, length in enumerate(self.LENGTHS):
            for page in range(-(-length // 128)):
                tokens = slice(page * 128, min(length, page * 128 + 128))
                for plane in (0, 1):
                    table[b, plane, page] = order[b, plane, page]
                    part = planes[b, plane, tokens]
                    pool[order[b, plane, page], : part.shape[0], :, :D] = part
        return pool, table, planes[:, 0], planes[:, 1]

    @pytest.mark.parametrize("query_len", [1, 3])
    @pytest.mark.parametrize("q_heads", [2, 6])
    def test_is_dense_attention_over_the_listed_tokens(self, generator, q_heads, query_len):
        pool, table, k, v = self.pool(generator)
        q = normal(generator, len(self.LENGTHS), query_len, q_heads, D)
        ids = torch.stack([lists(generator, 4, 21, length)[4 - query_len :] for length in self.LENGTHS])
        context = torch.tensor(self.LENGTHS, dtype=torch.int32)
        out, lse = reference.sparse_decode(q, pool, table, ids, context, SCALE, torch.float64)
        for b, length in enumerate(self.LENGTHS):
            for j in range(query_len):
                o, total = dense(q[b, j], k[b], v[b], ids[b, j], length)
                close(out[b, j], o)
                close(lse[b, j], total)

    @pytest.mark.parametrize("bad", [-1, -(2**31), 26, 2**31 - 1])
    @pytest.mark.parametrize("plane", [0, 1])
    def test_a_page_outside_the_pool_makes_its_tokens_invalid(self, generator, plane, bad):
        pool, table, k, v = self.pool(generator)
        table[0, plane, 1] = bad
        q = normal(generator, len(self.LENGTHS), 1, 2, D)
        ids = torch.tensor([5, 130, 255, 256, 384]).expand(len(self.LENGTHS), 1, 5).int()
        out, _ = reference.sparse_decode(q, pool, table, ids, torch.tensor([300] * 4), SCALE, torch.float64)
        close(out[0, 0], dense(q[0, 0], k[0], v[0], torch.tensor([5, 256]), 300)[0])

    def test_a_token_past_the_page_table_is_invalid(self, generator):
        pool, table, k, v = self.pool(generator)
        q = normal(generator, len(self.LENGTHS), 1, 2, D)
        ids = torch.tensor([5, 128, 299]).expand(len(self.LENGTHS), 1, 3).int()
        out, _ = reference.sparse_decode(q, pool, table[..., :1], ids, torch.tensor(self.LENGTHS), SCALE, torch.float64)
        close(out[0, 0], dense(q[0, 0], k[0], v[0], torch.tensor([5]), 300)[0])
