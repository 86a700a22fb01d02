"""The indexer's runners and the whole layer: decode reproduces prefill bit by bit, however the context came in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import ATOL, DTYPES, Guarded, normal, seeded
from indexer_cases import DEVICE, Indexer, bits, check_lists, check_pool, indexer, open_keys, stored_keys
from torch import Tensor

from qsa_cute.geometry import INDEX_WIDTH, PAGE_TOKENS
from qsa_cute.reference import attention as reference_attention
from qsa_cute.reference import indexer as reference
from qsa_cute.reference.indexer import Pool
from qsa_cute.runners.indexer import (
    IndexerDecodeParams,
    IndexerDecodeRunner,
    IndexerPrefillParams,
    IndexerPrefillRunner,
)
from qsa_cute.runners.layer import QsaLayer, QsaLayerDecodeParams, QsaLayerPrefillParams

TYPES = pytest.mark.parametrize("dtype", DTYPES)
# Around a few blocks, a page, 512 blocks and 8K; each sequence ends at another place in its block.
HISTORIES = ((17, 18, 19, 20), (127, 128, 129, 146), (2048, 2051, 2052, 2069), (8190, 8201))


def space(size: int) -> Tensor:
    """A workspace full of garbage."""
    return torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=DEVICE)


# Runs of the two runners over a part of a history.


def prefill(case: Indexer, pool: Pool | None, starts: Tensor, ends: Tensor, lists: Tensor, **changes: object) -> None:
    """Tokens [starts, ends) of every sequence in one call; their lists go to `lists` [batch, tokens, 2051]."""
    rows = case.chunk(starts, ends)
    out = Guarded(case.batch, rows.shape[1], INDEX_WIDTH, dtype=torch.int32)
    scratch = {name: value for name, value in changes.items() if name == "scratch_bytes"}
    workspace = space(IndexerPrefillRunner.workspace_size(case.batch, rows.shape[1], case.tokens, **scratch).size)
    pooled = {} if pool is None else {"kv_pool": pool.kv_pool, "page_table": pool.page_table, "query_starts": starts}
    params = IndexerPrefillParams.from_tensors(
        rows,
        case.cos_sin,
        ends,
        case.w_q,
        case.w_k,
        out.tensor,
        workspace,
        max_context_len=case.tokens,
        **{**pooled, **changes},
    )
    IndexerPrefillRunner.run(case.dtype, params)
    out.check()
    for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        lists[b, start:end] = out.tensor[b, : end - start]
        assert (out.tensor[b, end - start :] == -1).all(), "padded rows are all -1"


def decode(case: Indexer, pool: Pool, ends: Tensor, query_len: int, lists: Tensor) -> None:
    """The last query_len tokens before `ends`."""
    starts = ends - query_len
    rows, out = case.chunk(starts, ends), Guarded(case.batch, query_len, INDEX_WIDTH, dtype=torch.int32)
    workspace = space(IndexerDecodeRunner.workspace_size(case.batch, case.tokens, query_len).size)
    counters = torch.full((case.batch, query_len, 2), 5, dtype=torch.int32, device=DEVICE)
    params = IndexerDecodeParams.from_tensors(
        rows,
        case.cos_sin,
        ends,
        case.w_q,
        case.w_k,
        out.tensor,
        workspace,
        pool.kv_pool,
        pool.page_table,
        max_context_len=case.tokens,
        split_counters=counters,
    )
    assert len(params.launches) <= 3
    IndexerDecodeRunner.run(case.dtype, params)
    out.check()
    assert not counters.any()
    for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        lists[b, start:end] = out.tensor[b]


def new_lists(case: Indexer) -> Tensor:
    return torch.full((case.batch, case.tokens, INDEX_WIDTH), -1, dtype=torch.int32, device=DEVICE)


def at_once(case: Indexer, **changes: object) -> tuple[Tensor, Pool]:
    lists, pool = new_lists(case), case.pool()
    prefill(case, pool, torch.zeros_like(case.lengths), case.lengths, lists, **changes)
    return lists, pool


@dataclass(frozen=True)
class Plan:
    """How a history comes in: chunks that end so many tokens before the end, then steps of so many new tokens."""

    chunks: tuple[int, ...]
    steps: tuple[int, ...] = ()

    def run(self, case: Indexer) -> tuple[Tensor, Pool]:
        lists, pool = new_lists(case), case.pool()
        starts = torch.zeros_like(case.lengths)
        for left in self.chunks:
            ends = torch.maximum((case.lengths - left).clamp(min=0), starts).int()
            if int((ends - starts).max()):
                prefill(case, pool, starts, ends, lists)
            starts = ends
        for query_len in self.steps:
            starts = (starts + query_len).int()
            decode(case, pool, starts, query_len, lists)
        assert torch.equal(starts, case.lengths)
        return lists, pool


PLANS = {
    "one by one": Plan((16,), (1,) * 16),
    "speculative": Plan((16,), (3, 5, 8)),
    "pairs": Plan((16,), (2,) * 8),
    "uneven chunks": Plan((2001, 2000, 1333, 131, 128, 100, 16, 9, 8, 5, 0)),
    "chunks, then steps": Plan((1500, 131, 17, 16), (4, 1, 7, 4)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("lengths", HISTORIES, ids=lambda lengths: str(lengths[0]))
def test_decode_reproduces_prefill(lengths, plan):
    """Block keys and raw keys in the pool bit-identical, lists identical, for every token."""
    case = indexer(lengths, seed=lengths[0])
    lists, pool = at_once(case)
    again, other = plan.run(case)
    assert torch.equal(stored_keys(case, pool), stored_keys(case, other))
    assert torch.equal(open_keys(case, pool), open_keys(case, other))
    assert torch.equal(lists, again)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 9])
def test_decode_from_the_first_tokens(length):
    case = indexer((length,) * 2)
    lists, pool = at_once(case)
    again, other = Plan((length - 1,), (1,) * (length - 1)).run(case)
    assert torch.equal(stored_keys(case, pool), stored_keys(case, other))
    assert torch.equal(lists, again)


def test_the_other_type_and_rejected_tokens():
    """fp16; every step first verifies tokens of which all but the first are rejected."""
    case = indexer((2060, 2063, 2070), "fp16")
    lists, pool = at_once(case)
    again, other = new_lists(case), case.pool()
    wrong = indexer((2060, 2063, 2070), "fp16", seed=99)
    ends = case.lengths - 12
    prefill(case, other, torch.zeros_like(ends), ends.int(), again)
    for step in range(12):
        now = (ends + step).int()
        for b, end in enumerate(now.tolist()):  # the first token of a draft is right
            wrong.index_qk[b, end : end + 1] = case.index_qk[b, end : end + 1]
        wrong.w_q, wrong.w_k, wrong.page_table = case.w_q, case.w_k, case.page_table
        draft = min(6, 12 - step)
        decode(wrong, other, (now + draft).int(), draft, again)
    for b, length in enumerate(case.lengths.tolist()):
        assert torch.equal(lists[b, length - 12 : length], again[b, length - 12 : length])
    assert torch.equal(stored_keys(case, pool), stored_keys(case, other))


@TYPES
@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 5, 7, 8, 0), (2047, 2048, 2049, 2051, 2052), (4500, 8192)], ids=str)
def test_prefill_matches_the_reference(dtype, lengths):
    case = indexer(lengths, dtype)
    lists, pool = at_once(case)
    want = case.pool()
    blocks = case.tokens // 4
    q = reference.prepare_queries(case.index_qk, case.cos_sin, case.lengths, case.w_q)
    kbar = reference.compress_keys(case.index_qk, case.cos_sin, case.lengths, case.w_k, blocks, pool=want)
    reference.write_raw_tails(case.index_qk, case.lengths, want)
    check_pool(pool, case.pool(), want)
    positions = reference.positions_of(case.lengths, case.tokens, None)
    for b in range(case.batch):
        logits = reference.scores(q[b : b + 1], kbar[b : b + 1], case.lengths[b : b + 1], dtype=torch.float64)[0]
        check_lists(lists[b], logits, positions[b])


def test_chunks_of_rows_change_nothing():
    """The same lists whatever scratch there is, with and without a pool, in two runs."""
    case = indexer((3000, 2500))
    lists, _ = at_once(case)
    assert torch.equal(lists, at_once(case)[0])
    for scratch in (1 << 20, 3_000_000, 4):
        if scratch == 4:  # a row at a time
            case = indexer((2100,))
            lists, _ = at_once(case)
        assert torch.equal(lists, at_once(case, scratch_bytes=scratch)[0])
    alone = new_lists(case)
    prefill(case, None, torch.zeros_like(case.lengths), case.lengths, alone)
    assert torch.equal(lists, alone)


def test_a_captured_step_serves_every_length():
    """One graph, 12 replays over lengths that grow; every replay gives the bits of a plain run."""
    case = indexer((2100, 2061, 513))
    begin = (case.lengths - 12).int()
    pool, lists, expected = case.pool(), new_lists(case), new_lists(case)
    prefill(case, pool, torch.zeros_like(begin), begin, lists)
    plain = Pool(pool.kv_pool.clone(), pool.page_table)
    IndexerDecodeRunner.preflight(case.dtype)
    rows, lengths = case.chunk(begin, (begin + 1).int()), begin.clone()
    out = torch.empty(case.batch, 1, INDEX_WIDTH, dtype=torch.int32, device=DEVICE)
    workspace = space(IndexerDecodeRunner.workspace_size(case.batch, case.tokens).size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        params = IndexerDecodeParams.from_tensors(
            rows,
            case.cos_sin,
            lengths,
            case.w_q,
            case.w_k,
            out,
            workspace,
            pool.kv_pool,
            pool.page_table,
            max_context_len=case.tokens,
        )
        IndexerDecodeRunner.run(case.dtype, params)
    for step in range(12):
        ends = (begin + step + 1).int()
        rows.copy_(case.chunk(ends - 1, ends))
        lengths.copy_(ends)
        out.fill_(-7)
        workspace.fill_(0xFF)
        graph.replay()
        decode(case, plain, ends, 1, expected)
        for b, end in enumerate(ends.tolist()):
            assert torch.equal(out[b, 0], expected[b, end - 1])
    assert torch.equal(bits(pool.kv_pool), bits(plain.kv_pool))


# The whole layer.


@dataclass
class Layer:
    """An indexer's history with queries, keys and values; the pool holds K and V of every token."""

    case: Indexer
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    def pool(self) -> Pool:
        pool = self.case.pool()
        for b, length in enumerate(self.case.lengths.tolist()):
            tokens = torch.arange(length, device=DEVICE)
            for plane, values in enumerate((self.k, self.v)):
                pages = pool.page_table[b, plane, tokens // PAGE_TOKENS].long()
                pool.kv_pool[pages, tokens % PAGE_TOKENS, :, :256] = values[b, :length]
        return pool

    def rows(self, starts: Tensor, ends: Tensor) -> Tensor:
        count = int((ends - starts).max())
        out = torch.full((self.case.batch, count, *self.q.shape[2:]), torch.nan, dtype=self.q.dtype, device=DEVICE)
        for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            out[b, : end - start] = self.q[b, start:end]
        return out

    def prefill(self, pool: Pool, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """(lists, outputs) of the rows."""
        case, rows, q = self.case, self.case.chunk(starts, ends), self.rows(starts, ends)
        needed = QsaLayer.prefill_workspace_size(case.batch, q.shape[1], case.tokens)
        workspace, out = space(needed.size), Guarded(*q.shape, dtype=q.dtype)
        weights = (case.cos_sin, case.w_q, case.w_k)
        params = QsaLayerPrefillParams.from_tensors(
            rows,
            *weights,
            q,
            self.k,
            self.v,
            out.tensor,
            ends,
            workspace,
            attention_scale=self.scale,
            kv_pool=pool.kv_pool,
            page_table=pool.page_table,
            query_starts=starts,
        )
        QsaLayer.prefill(case.dtype, params)
        out.check()
        part = needed.parts[-1]
        lists = workspace[part.offset : part.offset + part.size].view(torch.int32).view(part.shape)
        return lists.clone(), out.tensor

    def decode(self, pool: Pool, ends: Tensor, query_len: int) -> Tensor:
        case, starts = self.case, (ends - query_len).int()
        rows, q = case.chunk(starts, ends), self.rows(starts, ends)
        workspace = space(QsaLayer.decode_workspace_size(case.batch, 2, 256, case.tokens, query_len).size)
        out = Guarded(*q.shape, dtype=q.dtype)
        params = QsaLayerDecodeParams.from_tensors(
            rows,
            case.cos_sin,
            case.w_q,
            case.w_k,
            q,
            pool.kv_pool,
            pool.page_table,
            out.tensor,
            ends,
            workspace,
            attention_scale=self.scale,
            max_context_len=case.tokens,
        )
        QsaLayer.decode(case.dtype, params)
        out.check()
        return out.tensor


def layer(lengths: tuple[int, ...], group: int = 12, dtype: str = "bf16") -> Layer:
    case = indexer(lengths, dtype)
    generator = seeded(3)
    q = normal(generator, case.dtype, case.batch, case.tokens, 2 * group, 256)
    k, v = (normal(generator, case.dtype, case.batch, case.tokens, 2, 256) for _ in range(2))
    for b, length in enumerate(lengths):
        for plane in (q, k, v):
            plane[b, length:] = torch.nan
    return Layer(case, q, k, v, 256**-0.5)


@pytest.mark.parametrize(
    ("lengths", "group", "dtype"),
    [((20, 17, 33), 12, "bf16"), ((2070, 2051, 300), 6, "fp16"), ((4100, 2052), 12, "bf16")],
    ids=str,
)
def test_a_layer_decodes_as_it_prefills(lengths, group, dtype):
    whole = layer(lengths, group, dtype)
    case, zero = whole.case, torch.zeros_like(whole.case.lengths)
    lists, out = whole.prefill(whole.pool(), zero, case.lengths)
    want, _ = reference_attention.sparse_prefill(whole.q, whole.k, whole.v, lists, case.lengths, whole.scale)
    error = (out.float() - want).abs().max().item()
    assert error <= ATOL, f"largest error {error}"
    pool, ends = whole.pool(), (case.lengths - 16).int()
    whole.prefill(pool, zero, ends)
    for query_len in (1, 1, 1, 1, 4, 8):
        ends = (ends + query_len).int()
        step = whole.decode(pool, ends, query_len)
        for b, end in enumerate(ends.tolist()):
            error = (step[b].float() - want[b, end - query_len : end]).abs().max().item()
            assert error <= ATOL, f"largest error {error} in sequence {b} at {end}"


def test_layers_share_a_workspace():
    """Two layers one after the other in one workspace, captured together: as each alone."""
    layers = [layer((2100, 600)), layer((2100, 600), 6)]
    layers[1].case.index_qk.mul_(-0.5)
    pools, expected = [each.pool() for each in layers], []
    ends = layers[0].case.lengths
    for each, pool in zip(layers, pools, strict=True):
        each.prefill(pool, torch.zeros_like(ends), (ends - 1).int())
        expected.append(each.decode(Pool(pool.kv_pool.clone(), pool.page_table), ends, 1))
    QsaLayer.preflight("bf16", head_dim=256)
    size = QsaLayer.decode_workspace_size(2, 2, 256, 2100).size
    workspace = space(size)
    inputs = [(each.case.chunk((ends - 1).int(), ends), each.rows((ends - 1).int(), ends)) for each in layers]
    outs = [torch.empty_like(q) for _, q in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each, pool, (rows, q), out in zip(layers, pools, inputs, outs, strict=True):
            case = each.case
            params = QsaLayerDecodeParams.from_tensors(
                rows,
                case.cos_sin,
                case.w_q,
                case.w_k,
                q,
                pool.kv_pool,
                pool.page_table,
                out,
                ends,
                workspace,
                attention_scale=each.scale,
                max_context_len=2100,
            )
            QsaLayer.decode("bf16", params)
    for _ in range(3):
        workspace.fill_(0xFF)
        graph.replay()
        for out, want in zip(outs, expected, strict=True):
            assert torch.equal(bits(out), bits(want))
            out.zero_()
