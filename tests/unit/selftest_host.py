"""The runners by the reference, in the memory of a driver that is the host: what the self-test's cases are run on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEAD_DIM, PAGE_TOKENS
from qsa_cute.reference import attention, indexer, kpool, metrale, paged, paged_select
from qsa_cute.runners import IndexerDecodeRunner, IndexerPrefillRunner, SparseDecodeRunner, SparsePrefillRunner
from qsa_cute.runners import kpool as kpool_launches
from qsa_cute.runners import metrale as metrale_launches
from qsa_cute.runners.indexer_select import Select
from qsa_cute.runners.kpool_expand import ExpandTail
from qsa_cute.runners.kpool_scores import PoolScores
from qsa_cute.runners.paged_attention import PagedAttentionRunner
from qsa_cute.runners.paged_select import ExpandCounted, PagedScores, PagedScoresDecode, PagedSelectDecode

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
I32, F32, U8 = torch.int32, torch.float32, torch.uint8


class HostDriver:
    """Memory of the host in the place of a device's."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.memory: dict[int, bytearray] = {}
        self._addresses = itertools.count(1 << 32, 1 << 28)
        self._capability = capability

    def capability(self, _device: int) -> tuple[int, int]:
        return self._capability

    def retain_primary(self, device: int) -> int:
        return device

    @contextmanager
    def pushed(self, _context: int):
        yield

    def allocate(self, size: int) -> int:
        address = next(self._addresses)
        self.memory[address] = bytearray(size)
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def upload(self, address: int, data: bytes) -> None:
        base = self._base(address)
        self.memory[base][address - base : address - base + len(data)] = data

    def download(self, address: int, size: int) -> bytes:
        base = self._base(address)
        return bytes(self.memory[base][address - base : address - base + size])

    def _base(self, address: int) -> int:
        return max(start for start in self.memory if start <= address)

    def tensor(self, address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A view of an allocation, from an address within it on."""
        base = self._base(address)
        flat = torch.frombuffer(self.memory[base], dtype=U8)[address - base :]
        return flat[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


# Each in the place of a runner's or launch's `run`: (driver, type, params).


def prefill(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    q = driver.tensor(p.q_ptr, dtype, 1, p.seq_len, p.num_q_heads, p.head_dim)
    k, v = (driver.tensor(at, dtype, 1, p.kv_seq_len, p.num_kv_heads, p.head_dim) for at in (p.k_ptr, p.v_ptr))
    lists = driver.tensor(p.indices, I32, 1, p.seq_len, p.top_k)
    lengths, starts = (driver.tensor(at, I32, 1) for at in (p.context_lengths, p.query_starts))
    out, _ = attention.sparse_prefill(q, k, v, lists, lengths, p.attention_scale, starts)
    driver.tensor(p.o_ptr, dtype, *out.shape).copy_(out)


def decode(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    q = driver.tensor(p.q_ptr, dtype, 1, p.query_len, p.num_q_heads, p.head_dim)
    pool = driver.tensor(p.kv_pool_ptr, dtype, p.num_flat_pages, PAGE_TOKENS, p.num_kv_heads, p.pool_head_dim)
    table = driver.tensor(p.page_table, I32, 1, 2, p.max_pages_per_seq)
    lists = driver.tensor(p.indices, I32, 1, p.query_len, p.top_k)
    lengths = driver.tensor(p.context_lengths, I32, 1)
    out, _ = attention.sparse_decode(q, pool, table, lists, lengths, p.attention_scale)
    driver.tensor(p.o_ptr, dtype, *out.shape).copy_(out)


def _index_inputs(driver: HostDriver, dtype: torch.dtype, p: Any, rows: int):
    state = p.pool_state
    shape = (state.num_flat_pages, PAGE_TOKENS, 1, state.pool_head_dim)
    table = driver.tensor(state.page_table, I32, 1, 2, state.max_pages_per_seq)
    pool = indexer.Pool(driver.tensor(state.pool_ptr, dtype, *shape), table, head_size=0)
    qk = driver.tensor(p.index_qk_ptr, dtype, 1, rows, 640)
    cos_sin = driver.tensor(p.cos_sin_ptr, F32, p.max_positions, 64)
    weights = [driver.tensor(at, dtype, 128) for at in (p.w_q_ptr, p.w_k_ptr)]
    return qk, cos_sin, driver.tensor(p.context_lengths, I32, 1), *weights, pool


def index_prefill(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    qk, cos_sin, lengths, w_q, w_k, pool = _index_inputs(driver, dtype, p, p.seq_len)
    keys = indexer.compress_keys(qk, cos_sin, lengths, w_k, p.seq_len // BLOCK_TOKENS, pool=pool)
    indexer.write_raw_tails(qk, lengths, pool)
    logits = indexer.scores(indexer.prepare_queries(qk, cos_sin, lengths, w_q), keys, lengths)
    lists = indexer.select_tokens(logits, torch.arange(p.seq_len)[None])
    driver.tensor(p.out_idx_ptr, I32, *lists.shape).copy_(lists)


def index_decode(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    qk, cos_sin, lengths, w_q, w_k, pool = _index_inputs(driver, dtype, p, p.query_len)
    queries = indexer.pre_decode(qk, cos_sin, lengths, w_q, w_k, pool)
    logits = indexer.scores_decode(queries, lengths, pool, int(lengths) // BLOCK_TOKENS)
    lists = indexer.select_tokens(logits, lengths[:, None] - 1)
    driver.tensor(p.out_idx_ptr, I32, *lists.shape).copy_(lists)


def paged_attention(driver: HostDriver, _: None, p: Any) -> None:
    q, gate, out = (
        driver.tensor(at, torch.bfloat16, p.rows, p.num_q_heads, p.head_dim) for at in (p.q_ptr, p.gate_ptr, p.o_ptr)
    )
    shape = (p.num_pages, p.page_size, p.num_kv_heads, p.head_dim)
    k, v = (driver.tensor(at, TYPES[p.cache_dtype], *shape) for at in (p.k_ptr, p.v_ptr))
    lists = driver.tensor(p.indices, I32, p.rows, p.width + 1)
    table = driver.tensor(p.block_table, I32, p.num_requests, p.table_width)
    requests = driver.tensor(p.token_to_req, I32, p.rows)
    scales = {"scale": p.attention_scale, "v_scale": p.output_scale}
    out.copy_(paged.sparse_paged_attention(q, k, v, lists, table, requests, gate=gate, **scales))


def _paged_logits(driver: HostDriver, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, NaN where a row does not see, and what each row sees), of a prefill or of a decode."""
    rows = getattr(p, "num_rows", None) or p.num_requests * p.query_len
    kind = TYPES[p.dtype]
    q = driver.tensor(p.q_ptr, kind, rows, p.num_heads, INDEX_HEAD_DIM)
    cache = driver.tensor(p.k_cache_ptr, kind, p.num_pages, p.page_size, 1, INDEX_HEAD_DIM)
    table = driver.tensor(p.page_table, I32, p.num_requests, p.table_width)
    visible = driver.tensor(p.visible_blocks, I32, rows)
    requests = torch.arange(rows) // getattr(p, "query_len", rows)
    if hasattr(p, "query_start_loc"):
        requests = paged_select.request_of_rows(rows, driver.tensor(p.query_start_loc, I32, p.num_requests + 1))
    return paged_select.scores(q, cache, table, requests, visible, p.num_columns), visible.clamp(0, p.num_columns)


def paged_scores(driver: HostDriver, _: Any, p: Any) -> None:
    want, visible = _paged_logits(driver, p)
    logits = driver.tensor(p.logits_ptr, F32, *want.shape)
    logits.copy_(torch.where(want.isnan(), logits, want))
    driver.tensor(p.lengths_ptr, I32, len(want)).copy_(4 * visible)


def paged_selection(driver: HostDriver, _: Any, p: Any) -> None:
    logits, visible = _paged_logits(driver, p)
    driver.tensor(p.out_ptr, I32, len(logits), 512).copy_(kpool.select(logits.float(), 4 * visible))


def select(driver: HostDriver, _: Any, p: Any) -> None:
    logits = driver.tensor(p.logits_ptr, F32, p.batch_size, p.logits_stride_row)[:, : p.num_blocks]
    lengths = driver.tensor(p.context_lengths, I32, p.batch_size)
    driver.tensor(p.out_ptr, I32, p.batch_size, 512).copy_(kpool.select(logits, lengths))


def expand_counted(driver: HostDriver, _: Any, p: Any) -> None:
    blocks = driver.tensor(p.block_indices, I32, p.num_rows, p.top_blocks)
    positions, visible = (driver.tensor(at, I32, p.num_rows) for at in (p.query_positions, p.visible_blocks))
    lists = paged_select.expand_counted(blocks, positions, visible, 4 * p.top_blocks)
    driver.tensor(p.out_ptr, I32, *lists.shape).copy_(lists)


def hadamard(driver: HostDriver, _: None, p: Any) -> None:
    key, scale = kpool.hadamard_quant(driver.tensor(p.q_ptr, torch.bfloat16, p.num_rows, 128))
    driver.tensor(p.out_ptr, torch.float8_e4m3fn, p.num_rows, 128).copy_(key)
    driver.tensor(p.scale_ptr, F32, p.num_rows, 1).copy_(scale)


def _cache(driver: HostDriver, p: Any) -> torch.Tensor:
    return driver.tensor(p.cache_ptr, U8, p.num_pages, p.page_size, 132)


def compress(driver: HostDriver, _: None, p: Any) -> None:
    shape = (p.num_pools, p.pool_size, 128)
    k, score = (driver.tensor(at, torch.bfloat16, *shape) for at in (p.slot_k_ptr, p.slot_score_ptr))
    found = kpool.compress(k, score, driver.tensor(p.ape_ptr, F32, p.pool_size, 128))
    kpool.write_cache(_cache(driver, p), driver.tensor(p.loc_ptr, I32, p.num_pools), *found)


def _tail(driver: HostDriver, p: Any) -> torch.Tensor:
    return driver.tensor(p.tail_ptr, torch.bfloat16, p.num_tail_blocks, 2, p.ring, 128)


def seed_tail(driver: HostDriver, _: None, p: Any) -> None:
    key, score = (driver.tensor(at, torch.bfloat16, p.num_tokens, 128) for at in (p.key_ptr, p.gate_score_ptr))
    kpool.seed_tail(_tail(driver, p), key, score, driver.tensor(p.tail_slots_ptr, I32, p.num_tokens), p.pool_size)


def decode_update(driver: HostDriver, _: None, p: Any) -> None:
    rows = (p.num_requests, p.next_n)
    key, score = (driver.tensor(at, torch.bfloat16, *rows, 128) for at in (p.key_ptr, p.slot_score_ptr))
    tail_slots, slots, places = (
        driver.tensor(at, I32, *rows) for at in (p.tail_slots_ptr, p.slots_ptr, p.positions_ptr)
    )
    ape = driver.tensor(p.ape_ptr, F32, p.pool_size, 128)
    kpool.decode_update(_cache(driver, p), _tail(driver, p), tail_slots, key, score, ape, slots, places)


def expand_tail(driver: HostDriver, _: None, p: Any) -> None:
    ids = driver.tensor(p.ids_ptr, I32, p.num_rows, p.topk // p.pool_size)
    lists = kpool.expand_and_append_tail(ids, driver.tensor(p.seq_lens_ptr, I32, p.num_rows), p.pool_size)
    driver.tensor(p.out_ptr, I32, *lists.shape).copy_(lists)


def pool_scores(driver: HostDriver, _: None, p: Any) -> None:
    q = driver.tensor(p.q_ptr, torch.float8_e4m3fn, p.num_rows, 32, 128)
    weights = driver.tensor(p.weights_ptr, F32, p.num_rows, 32)
    table = driver.tensor(p.block_table_ptr, I32, p.num_requests, p.max_pages)
    lengths = driver.tensor(p.seq_lens_ptr, I32, p.num_rows)
    owners = torch.arange(p.num_rows) // (p.next_n or p.num_rows)
    want = kpool.scores(q, weights, _cache(driver, p), table, lengths, owners, p.num_pools)
    logits = driver.tensor(p.logits_ptr, F32, p.num_rows, p.logits_stride_row)[:, : p.num_pools]
    logits.copy_(torch.where(want.isnan(), logits, want))


def block_pool(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    row = 2 * p.hd
    raw = driver.tensor(p.raw_keys + p.first_block * p.ratio * row, dtype, p.n_new * p.ratio, p.hd)
    weight = driver.tensor(p.k_norm_w, dtype, p.hd)
    keys = metrale.block_pool(raw, weight, p.first_block, p.ratio, p.rot, p.theta, p.eps)
    driver.tensor(p.block_keys + p.first_block * row, dtype, p.n_new, p.hd).copy_(keys)


def query_prep(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    q = driver.tensor(p.q_in, dtype, p.rows, p.pitch)[:, : p.n_heads * p.hd].unflatten(1, (p.n_heads, p.hd))
    weight = driver.tensor(p.q_norm_w, dtype, p.hd)
    out = metrale.qprep(q, weight, p.first_pos, p.rot, p.theta, p.eps)
    driver.tensor(p.q_out, F32, *out.shape).copy_(out)


def score(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    q, keys = driver.tensor(p.q, F32, p.n_heads, p.hd), driver.tensor(p.block_keys, dtype, p.n_blocks, p.hd)
    driver.tensor(p.scores, F32, p.n_blocks).copy_(metrale.score(q, keys))


def score_rows(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    q, keys = driver.tensor(p.q, F32, p.rows, 4, 128), driver.tensor(p.block_keys, dtype, p.n_blocks_max, 128)
    found = metrale.score_rows(q, keys, p.first_pos, p.ratio)
    driver.tensor(p.scores, F32, p.rows, p.score_stride)[:, : p.n_blocks_max].copy_(found)


def _pages(driver: HostDriver, dtype: torch.dtype, p: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """K and V of as many pages as the table names, and the table; the cases' has seven entries."""
    table = driver.tensor(p.block_table, I32, 7)
    shape = (int(table.max()) + 1, p.block_size, p.nkv, p.hd)
    return [driver.tensor(at, dtype, *shape) for at in (p.k_cache, p.v_cache)], table


def gather(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    planes, table = _pages(driver, dtype, p)
    selected = driver.tensor(p.sel, I32, p.n_sel)
    for plane, at in zip(planes, (p.k_out, p.v_out), strict=True):
        out = driver.tensor(at, torch.int16, p.n_sel, p.nkv, p.hd)
        out.copy_(metrale.gather(plane.view(torch.int16), table, selected, out.clone()))


def prefill_attention(driver: HostDriver, dtype: torch.dtype, p: Any) -> None:
    (k, v), table = _pages(driver, dtype, p)
    q, out = (driver.tensor(at, dtype, p.rows, p.nq, p.hd) for at in (p.q, p.attn_out))
    lists = driver.tensor(p.lists, I32, p.rows, p.topk)
    out.copy_(metrale.prefill_attn(q, k, v, table, lists, p.first_pos, p.ratio, p.inv_sqrt_d))


Work = Callable[[HostDriver, Any, Any], None]
# Runners, whose run takes (type, params), (params), and launches, whose run is a method with or without a type.
TYPED: dict[Any, Work] = {
    SparsePrefillRunner: prefill,
    SparseDecodeRunner: decode,
    IndexerPrefillRunner: index_prefill,
    IndexerDecodeRunner: index_decode,
}
LAUNCHES: dict[Any, Work] = {
    PagedScores: paged_scores,
    PagedScoresDecode: paged_scores,
    PagedSelectDecode: paged_selection,
    Select: select,
    ExpandCounted: expand_counted,
    kpool_launches.HadamardQuant: hadamard,
    kpool_launches.CompressWrite: compress,
    kpool_launches.SeedTail: seed_tail,
    kpool_launches.DecodeUpdate: decode_update,
    ExpandTail: expand_tail,
    PoolScores: pool_scores,
    metrale_launches.BlockPool: block_pool,
    metrale_launches.QueryPrep: query_prep,
    metrale_launches.Score: score,
    metrale_launches.ScoreRows: score_rows,
    metrale_launches.ScoreRowsTc: score_rows,
    metrale_launches.Gather: gather,
    metrale_launches.PrefillAttention: prefill_attention,
}


def install(driver: HostDriver, monkeypatch: Any) -> None:
    """Every runner and launch of the self-test computes by the reference, in the memory of this driver."""
    for runner, work in TYPED.items():
        monkeypatch.setattr(runner, "run", staticmethod(lambda dtype, p, work=work: work(driver, TYPES[dtype], p)))
    monkeypatch.setattr(PagedAttentionRunner, "run", staticmethod(lambda p: paged_attention(driver, None, p)))
    for launch, work in LAUNCHES.items():
        monkeypatch.setattr(launch, "run", lambda p, dtype=None, work=work: work(driver, TYPES.get(dtype), p))


def install_nothing(monkeypatch: Any) -> None:
    """Every runner and launch does nothing."""
    for one in (*TYPED, PagedAttentionRunner):
        monkeypatch.setattr(one, "run", staticmethod(lambda *_: None))
    for one in LAUNCHES:
        monkeypatch.setattr(one, "run", lambda *_: None)
