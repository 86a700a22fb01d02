"""The indexer's reference against independent formulations: loops, complex rotations, Python's sort."""

from __future__ import annotations

import math

import pytest
import torch

from qsa_cute.geometry import INDEX_WIDTH, PAGE_TOKENS, ROPE_THETA, TOP_BLOCKS
from qsa_cute.reference import indexer as reference
from qsa_cute.reference.indexer import MASKED, Pool

BATCH = 3
T = torch.bfloat16


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(11)


def normal(generator, *shape, dtype=T):
    return torch.randn(shape, generator=generator).to(dtype)


class Inputs:
    """A batch of projections, weights, and a pool of NaN with permuted pages."""

    def __init__(self, generator, tokens, pages=4):
        self.index_qk = normal(generator, BATCH, tokens, 640)
        self.w_q, self.w_k = normal(generator, 128) * 0.1, normal(generator, 128) * 0.1
        self.cos_sin = reference.rope_table(pages * PAGE_TOKENS)
        self.pages = torch.randperm(BATCH * pages, generator=generator).int().view(BATCH, pages)
        self.pool = self.new_pool()

    def new_pool(self):
        pages = self.pages.numel()
        table = torch.stack([self.pages, self.pages + pages], 1)
        return Pool(torch.full((2 * pages, PAGE_TOKENS, 2, 384), torch.nan, dtype=T), table)


def vector(x, weight, position):
    """Norm and rope of one vector in FP64, the rotation as a complex product."""
    x, weight = x.double(), weight.double()
    y = x / math.sqrt(float((x * x).sum()) / 128 + 1e-6) * (1 + weight)
    pairs = torch.complex(y[:32], y[32:64])
    angles = position * ROPE_THETA ** -(torch.arange(32, dtype=torch.float64) / 32)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, y[64:]))


def test_queries_are_normed_and_rotated(generator):
    inputs = Inputs(generator, 9)
    starts, lengths = torch.tensor([0, 5, 100]), torch.tensor([9, 12, 103])
    found = reference.prepare_queries(inputs.index_qk, inputs.cos_sin, lengths, inputs.w_q, query_starts=starts)
    for b in range(BATCH):
        for t in range(9):
            position = int(starts[b]) + t
            for h in range(4):
                expected = torch.zeros(128, dtype=torch.float64)
                if position < lengths[b]:
                    expected = vector(inputs.index_qk[b, t, 128 * h : 128 * h + 128], inputs.w_q, position)
                torch.testing.assert_close(found[b, t, h].double(), expected, rtol=1e-2, atol=1e-3)


def test_interleaved_pairs_would_be_noticed(generator):
    """A rotation of neighbours instead of (i, i + 32) differs at every position but 0."""
    x, w = normal(generator, 128, dtype=torch.float32), torch.zeros(128)
    table = reference.rope_table(8)
    ours = reference.norm_rope(x, w, table, torch.tensor(5), 1e-6)
    shuffled = torch.cat((x[:64].view(2, 32).T.flatten(), x[64:]))
    other = reference.norm_rope(shuffled, w, table, torch.tensor(5), 1e-6)
    assert not torch.allclose(ours, torch.cat((other[:64].view(32, 2).T.flatten(), other[64:])), atol=1e-2)


def test_padding_is_not_read(generator):
    inputs = Inputs(generator, 10)
    lengths = torch.tensor([10, 0, 6])
    poisoned = inputs.index_qk.clone()
    for b, length in enumerate(lengths.tolist()):
        poisoned[b, length:] = torch.nan
    for qk in (inputs.index_qk, poisoned):
        q = reference.prepare_queries(qk, inputs.cos_sin, lengths, inputs.w_q)
        keys = reference.compress_keys(qk, inputs.cos_sin, lengths, inputs.w_k, 3)
        assert q.isfinite().all()
        assert not q[1].any()
        assert keys.isfinite().all()
        assert keys[0, 1].any()
        assert not keys[0, 2].any()  # incomplete
        assert not keys[2, 1].any()


def test_a_block_key_is_made_of_the_mean(generator):
    inputs = Inputs(generator, 12)
    lengths = torch.tensor([12, 11, 3])
    found = reference.compress_keys(inputs.index_qk, inputs.cos_sin, lengths, inputs.w_k, 3)
    for b in range(BATCH):
        for g in range(3):
            expected = torch.zeros(128, dtype=torch.float64)
            if 4 * g + 3 < lengths[b]:
                mean = inputs.index_qk[b, 4 * g : 4 * g + 4, 512:].double().mean(0).to(T)
                expected = vector(mean, inputs.w_k, 4 * g)
            torch.testing.assert_close(found[b, g].double(), expected, rtol=2e-2, atol=1e-2)


def fill_by_chunks(inputs, lengths, cuts):
    """The pool after prefills of [0, cuts[0]), [cuts[0], cuts[1]), ...; and the last dense keys."""
    pool, keys, begin = inputs.new_pool(), None, 0
    for end in (*cuts, inputs.index_qk.shape[1]):
        starts = torch.minimum(torch.tensor(begin), lengths)
        now = torch.minimum(torch.tensor(end), lengths)
        chunk = inputs.index_qk[:, begin:end]
        args = (inputs.cos_sin, now, inputs.w_k, end // 4)
        keys = reference.compress_keys(chunk, *args, query_starts=starts, pool=pool, read_pool=True)
        reference.write_raw_tails(chunk, now, pool, starts)
        begin = end
    return pool, keys


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (127, 129), (128,), (5, 6, 7, 8, 131), tuple(range(1, 200))])
def test_chunks_leave_the_keys_of_one_prefill(generator, cuts):
    inputs = Inputs(generator, 203)
    lengths = torch.tensor([203, 130, 7])
    whole = reference.compress_keys(inputs.index_qk, inputs.cos_sin, lengths, inputs.w_k, 50)
    pool, keys = fill_by_chunks(inputs, lengths, cuts)
    assert torch.equal(keys, whole)
    first = (4 * torch.arange(50)).expand(BATCH, -1)
    stored, mapped = pool.tails(1, first)
    complete = first + 3 < lengths[:, None]
    assert mapped.all()
    assert torch.equal(stored[complete], whole[complete])
    assert stored[~complete].isnan().all()
    for b, length in enumerate(lengths.tolist()):
        open_tokens = torch.arange(length // 4 * 4, length)
        raw, _ = pool.tails(0, open_tokens.expand(BATCH, -1))
        assert torch.equal(raw[b], inputs.index_qk[b, open_tokens, 512:])
        never, _ = pool.tails(0, (4 * torch.arange(length // 4) + 3).expand(BATCH, -1))
        assert never[b].isnan().all()


@pytest.mark.parametrize("query_len", [1, 2, 3, 5, 8])
def test_decode_steps_leave_the_pool_of_one_prefill(generator, query_len):
    inputs = Inputs(generator, 60)
    steps = 16 // query_len
    begin = 60 - steps * query_len
    whole, _ = fill_by_chunks(inputs, torch.full((BATCH,), 60), ())
    expected_q = reference.prepare_queries(inputs.index_qk, inputs.cos_sin, torch.full((BATCH,), 60), inputs.w_q)
    inputs_before = Inputs.__new__(Inputs)
    inputs_before.__dict__ |= inputs.__dict__ | {"index_qk": inputs.index_qk[:, :begin]}
    pool, _ = fill_by_chunks(inputs_before, torch.full((BATCH,), begin), ())
    for step in range(steps):
        at = begin + step * query_len
        new = inputs.index_qk[:, at : at + query_len]
        lengths = torch.full((BATCH,), at + query_len)
        q = reference.pre_decode(new, inputs.cos_sin, lengths, inputs.w_q, inputs.w_k, pool)
        torch.testing.assert_close(q, expected_q[:, at : at + query_len], rtol=0, atol=0)
    first = (4 * torch.arange(15)).expand(BATCH, -1)
    assert torch.equal(pool.tails(1, first)[0], whole.tails(1, first)[0])


def test_rejected_tokens_leave_no_trace(generator):
    """A step of 4 of which 1 token is kept, then 3 others: as if these had come at once."""
    inputs = Inputs(generator, 10)
    clean, dirty = inputs.new_pool(), inputs.new_pool()
    weights = (inputs.cos_sin, torch.full((BATCH,), 8), inputs.w_q, inputs.w_k)
    for pool in (clean, dirty):
        reference.write_raw_tails(inputs.index_qk[:, :1], torch.full((BATCH,), 1), pool)
    wrong = normal(generator, BATCH, 4, 640)
    wrong[:, 0] = inputs.index_qk[:, 1]
    reference.pre_decode(wrong, inputs.cos_sin, torch.full((BATCH,), 5), *weights[2:], dirty)
    reference.pre_decode(inputs.index_qk[:, 2:8], *weights, dirty)
    reference.pre_decode(inputs.index_qk[:, 1:8], *weights, clean)
    first = torch.tensor([[0, 4]]).expand(BATCH, -1)
    assert torch.equal(dirty.tails(1, first)[0], clean.tails(1, first)[0])


def test_unmapped_pages_are_left_alone(generator):
    inputs = Inputs(generator, 300)
    inputs.pool.page_table[0, 1, 1] = -1
    inputs.pool.page_table[1, 1, 0] = 10**6
    inputs.pool.page_table[2, 0, 2] = -7
    before = inputs.pool.kv_pool.clone()
    lengths = torch.full((BATCH,), 299)
    reference.compress_keys(inputs.index_qk, inputs.cos_sin, lengths, inputs.w_k, 74, pool=inputs.pool)
    reference.write_raw_tails(inputs.index_qk, lengths, inputs.pool)
    changed = ~(torch.isnan(inputs.pool.kv_pool) & torch.isnan(before))
    assert not changed[..., :256].any()
    assert not changed[:, :, 1].any()
    blocks = changed[:, :, 0, 256:].all(-1).sum().item()
    assert blocks == BATCH * 74 - 2 * 32 + 2 * 3  # two pages of block keys; the raw keys of one sequence


class TestScores:
    def test_relu_a_head_then_the_sum(self, generator):
        """Heads that cancel: any other order of ReLU and sum is far off."""
        q = normal(generator, 1, 9, 4, 128)
        q[:, :, 1], q[:, :, 3] = -q[:, :, 0], -q[:, :, 2]
        kbar = normal(generator, 1, 2, 128)
        found = reference.scores(q, kbar, torch.tensor([9]))[0]
        for t in range(9):
            for g in range(2):
                if g >= (t + 1) // 4:
                    assert found[t, g] == MASKED
                    continue
                total = sum(max(0.0, float(q[0, t, h].double() @ kbar[0, g].double())) for h in range(4))
                assert found[t, g].item() == pytest.approx(total / math.sqrt(128), rel=1e-4)

    def test_what_no_row_sees_is_not_read(self, generator):
        q, kbar = normal(generator, 2, 10, 4, 128), normal(generator, 2, 6, 128)
        q[1, 7:], kbar[0, 2:], kbar[1, 1:] = torch.nan, torch.nan, torch.nan
        found = reference.scores(q, kbar, torch.tensor([10, 7]))
        assert found.isfinite().all()
        assert (found[1, 7:] == MASKED).all()

    def test_decode_is_prefill(self, generator):
        inputs = Inputs(generator, 300)
        lengths = torch.tensor([300, 259, 6])
        kbar = reference.compress_keys(inputs.index_qk, inputs.cos_sin, lengths, inputs.w_k, 75, pool=inputs.pool)
        q = normal(generator, BATCH, 5, 4, 128)
        starts = lengths - 5
        whole = reference.scores(q, kbar, lengths, starts, torch.float64)
        assert torch.equal(reference.scores_decode(q, lengths, inputs.pool, 75, torch.float64), whole)


def ranked(values):
    """The contract's order, by Python's sort."""
    order = sorted(
        range(len(values)), key=lambda i: (math.isnan(values[i]), 0 if math.isnan(values[i]) else -values[i], i)
    )
    return order[:TOP_BLOCKS]


FAMILIES = {
    "normal": lambda g, n: torch.randn(n, generator=g),
    "equal": lambda g, n: torch.full((n,), 0.25),
    "narrow": lambda g, n: 1 + 1e-3 * torch.rand(n, generator=g),
    "rounded": lambda g, n: (2 * torch.randn(n, generator=g)).round() / 2,
    "zeros": lambda g, n: torch.where(torch.rand(n, generator=g) < 0.5, 0.0, -0.0),
    "nan": lambda g, n: torch.where(torch.rand(n, generator=g) < 0.6, torch.nan, torch.randn(n, generator=g)),
    "infinite": lambda g, n: torch.where(torch.rand(n, generator=g) < 0.4, -torch.inf, torch.rand(n, generator=g)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("visible", [0, 1, 511, 512, 513, 700, 1000])
def test_selection_is_a_stable_sort(generator, family, visible):
    logits = torch.full((1000,), torch.inf)
    logits[:visible] = FAMILIES[family](generator, visible)
    found = reference.select(logits, torch.tensor(visible))
    expected = ranked(logits[:visible].tolist())
    assert found.tolist() == expected + [-1] * (TOP_BLOCKS - len(expected))


@pytest.mark.parametrize("position", [-1, 0, 1, 2, 3, 4, 6, 7, 2046, 2047, 2048, 2049, 2050, 2051, 2052, 5000])
def test_expansion(generator, position):
    visible, tail = (position + 1) // 4, (position + 1) % 4
    ids = torch.full((600,), 10**6)  # what lies past the chosen ones is not looked at
    ids[: min(512, visible)] = torch.randperm(max(visible, 0), generator=generator)[:512]
    expected = [4 * int(i) + j for i in ids[: min(512, visible)] for j in range(4)]
    expected += [4 * visible + j for j in range(tail)]
    found = reference.expand(ids, torch.tensor(position)).tolist()
    assert found == expected + [-1] * (INDEX_WIDTH - len(expected))
    assert len(set(expected)) == len(expected)
    assert all(0 <= token <= position for token in expected)


def test_a_list_names_the_row_itself_or_its_block(generator):
    positions = torch.arange(4000)
    lists = reference.select_tokens(torch.randn(4000, 1000, generator=generator), positions)
    counts = (lists >= 0).sum(1)
    assert torch.equal(counts, torch.where(positions < 2051, positions + 1, 2048 + (positions + 1) % 4))
