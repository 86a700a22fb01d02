"""The self-test's own arithmetic against the reference, and that it finds out kernels that are wrong."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch

from qsa_cute import selftest
from qsa_cute.errors import DriverError
from qsa_cute.geometry import BLOCK_TOKENS, INDEX_WIDTH, PAGE_TOKENS
from qsa_cute.reference import attention, indexer
from qsa_cute.runners import IndexerDecodeRunner, IndexerPrefillRunner, SparseDecodeRunner, SparsePrefillRunner

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RUNNERS = (SparsePrefillRunner, SparseDecodeRunner, IndexerPrefillRunner, IndexerDecodeRunner)
each = pytest.mark.parametrize("dtype", TYPES)


def half(bits, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bits.tobytes()), dtype=TYPES[dtype])


@each
def test_numbers(dtype) -> None:
    bits = selftest.half_bits(selftest.random.Random(1), dtype, 5000)
    values = half(bits, dtype)
    assert selftest.floats(bits, dtype) == values.tolist()
    assert values.abs().min() >= 0.5
    assert values.abs().max() < 2
    some = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert [selftest.rounded(value, dtype) for value in some.tolist()] == some.to(TYPES[dtype]).tolist()


@each
@pytest.mark.parametrize("dim", [256, 128])
def test_attention(dtype, dim) -> None:
    q, k, v, want = selftest._attention_inputs(dtype, dim, twice=True)
    k, v = (half(plane, dtype).view(1, -1, selftest.KV_HEADS, dim) for plane in (k, v))
    q = half(q, dtype).view(1, selftest.ROWS, -1, dim)
    lists = torch.tensor(selftest._lists(twice=True), dtype=torch.int32).view(1, selftest.ROWS, -1)
    context = torch.tensor([selftest.CONTEXT], dtype=torch.int32)
    found, _ = attention.sparse_prefill(q, k, v, lists, context, dim**-0.5, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(want, dtype=torch.float64), found.flatten(), rtol=1e-9, atol=1e-9)


@each
def test_indexer(dtype) -> None:
    case = selftest.IndexerCase(dtype)
    qk = half(case.qk, dtype).view(1, selftest.TOKENS + 1, -1)
    length = torch.tensor([selftest.TOKENS + 1], dtype=torch.int32)
    table = torch.frombuffer(bytearray(case.cos_sin().tobytes()), dtype=torch.float32).view(-1, 64)
    assert torch.equal(table, indexer.rope_table(selftest.TOKENS + 1))
    keys = indexer.compress_keys(qk, table, length, half(case.w_k, dtype), len(case.keys), dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(case.keys), keys[0].float(), rtol=1e-2, atol=1e-3)
    assert (torch.tensor(case.keys) == keys[0].float()).float().mean() > 0.999
    queries = indexer.prepare_queries(qk, table, length, half(case.w_q, dtype), dtype=torch.float64)
    rows = indexer.scores(queries, keys, length, dtype=torch.float64)[0]
    for row in (selftest.TOKENS - 1, selftest.TOKENS):
        found = torch.tensor(case.scores(row), dtype=torch.float64)
        torch.testing.assert_close(found, rows[row], rtol=1e-2, atol=1e-2)
        tokens = indexer.select_tokens(found.float()[None], torch.tensor([row]))[0].tolist()
        assert selftest.wrong_list(tokens, row, found.tolist()) == ""


def test_wrong_lists() -> None:
    scores = [float(i) for i in range(515)]  # the first three fall out
    right = [*range(12, 2061), -1, -1]
    assert selftest.wrong_list(right, 2060, scores) == ""
    for wrong, said in (
        ([*range(8, 12), *right[4:]], "not the best"),  # block 2 in the place of block 3
        ([*right[:4], *right[:4], *right[8:]], "not whole blocks"),  # twice the same
        ([*range(2060, 2064), *right[4:]], "does not see"),
        ([*right[:2048], -1, -1, -1], "not whole blocks"),  # no open block
        ([right[1], right[0], *right[2:]], "not whole blocks"),
        ([0] * INDEX_WIDTH, "not whole blocks"),
    ):
        assert said in selftest.wrong_list(wrong, 2060, scores)
    few = [*range(7), *[-1] * (INDEX_WIDTH - 7)]
    assert selftest.wrong_list(few, 6, None) == ""
    assert "not whole blocks" in selftest.wrong_list(few, 7, None)


class HostDriver:
    """Memory of the host in the place of a device's."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self._addresses = itertools.count(1 << 32, 1 << 28)

    def capability(self, _device: int) -> tuple[int, int]:
        return 9, 0

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
        self.memory[address][:] = data

    def download(self, address: int, size: int) -> bytes:
        return bytes(self.memory[address][:size])

    def tensor(self, address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A view of an allocation, from an address within it on."""
        base = max(start for start in self.memory if start <= address)
        flat = torch.frombuffer(self.memory[base], dtype=torch.uint8)[address - base :].view(dtype)
        return flat[: torch.Size(shape).numel()].view(shape)


@pytest.fixture
def driver(monkeypatch) -> HostDriver:
    """The runners compute by the reference, in the memory of this driver."""
    driver = HostDriver()
    for runner, work in zip(RUNNERS, (prefill, decode, index_prefill, index_decode), strict=True):
        monkeypatch.setattr(runner, "run", staticmethod(lambda dtype, p, work=work: work(driver, TYPES[dtype], p)))
    return driver


def prefill(driver: HostDriver, dtype: torch.dtype, p) -> None:
    q = driver.tensor(p.q_ptr, dtype, 1, p.seq_len, p.num_q_heads, p.head_dim)
    k, v = (driver.tensor(at, dtype, 1, p.kv_seq_len, p.num_kv_heads, p.head_dim) for at in (p.k_ptr, p.v_ptr))
    lists = driver.tensor(p.indices, torch.int32, 1, p.seq_len, p.top_k)
    lengths, starts = (driver.tensor(at, torch.int32, 1) for at in (p.context_lengths, p.query_starts))
    out, _ = attention.sparse_prefill(q, k, v, lists, lengths, p.attention_scale, starts)
    driver.tensor(p.o_ptr, dtype, *out.shape).copy_(out)


def decode(driver: HostDriver, dtype: torch.dtype, p) -> None:
    q = driver.tensor(p.q_ptr, dtype, 1, p.query_len, p.num_q_heads, p.head_dim)
    pool = driver.tensor(p.kv_pool_ptr, dtype, p.num_flat_pages, PAGE_TOKENS, p.num_kv_heads, p.pool_head_dim)
    table = driver.tensor(p.page_table, torch.int32, 1, 2, p.max_pages_per_seq)
    lists = driver.tensor(p.indices, torch.int32, 1, p.query_len, p.top_k)
    lengths = driver.tensor(p.context_lengths, torch.int32, 1)
    out, _ = attention.sparse_decode(q, pool, table, lists, lengths, p.attention_scale)
    driver.tensor(p.o_ptr, dtype, *out.shape).copy_(out)


def _index_inputs(driver: HostDriver, dtype: torch.dtype, p, rows: int):
    state = p.pool_state
    shape = (state.num_flat_pages, PAGE_TOKENS, 1, state.pool_head_dim)
    table = driver.tensor(state.page_table, torch.int32, 1, 2, state.max_pages_per_seq)
    pool = indexer.Pool(driver.tensor(state.pool_ptr, dtype, *shape), table, head_size=0)
    qk = driver.tensor(p.index_qk_ptr, dtype, 1, rows, 640)
    cos_sin = driver.tensor(p.cos_sin_ptr, torch.float32, p.max_positions, 64)
    weights = [driver.tensor(at, dtype, 128) for at in (p.w_q_ptr, p.w_k_ptr)]
    return qk, cos_sin, driver.tensor(p.context_lengths, torch.int32, 1), *weights, pool


def index_prefill(driver: HostDriver, dtype: torch.dtype, p) -> None:
    qk, cos_sin, lengths, w_q, w_k, pool = _index_inputs(driver, dtype, p, p.seq_len)
    keys = indexer.compress_keys(qk, cos_sin, lengths, w_k, p.seq_len // BLOCK_TOKENS, pool=pool)
    indexer.write_raw_tails(qk, lengths, pool)
    logits = indexer.scores(indexer.prepare_queries(qk, cos_sin, lengths, w_q), keys, lengths)
    lists = indexer.select_tokens(logits, torch.arange(p.seq_len)[None])
    driver.tensor(p.out_idx_ptr, torch.int32, *lists.shape).copy_(lists)


def index_decode(driver: HostDriver, dtype: torch.dtype, p) -> None:
    qk, cos_sin, lengths, w_q, w_k, pool = _index_inputs(driver, dtype, p, p.query_len)
    queries = indexer.pre_decode(qk, cos_sin, lengths, w_q, w_k, pool)
    logits = indexer.scores_decode(queries, lengths, pool, int(lengths) // BLOCK_TOKENS)
    lists = indexer.select_tokens(logits, lengths[:, None] - 1)
    driver.tensor(p.out_idx_ptr, torch.int32, *lists.shape).copy_(lists)


def test_right_kernels_pass(driver) -> None:
    checks = selftest.run(0, driver)
    assert [check["name"] for check in checks if not check["ok"]] == [], checks
    assert len(checks) == len({check["name"] for check in checks}) == 18
    assert driver.memory == {}  # all freed


def test_kernels_that_do_nothing_fail(driver, monkeypatch) -> None:
    for runner in RUNNERS:
        monkeypatch.setattr(runner, "run", staticmethod(lambda *_: None))
    assert not any(check["ok"] for check in selftest.run(0, driver))


def test_a_kernel_that_fails_is_named_and_the_others_run_on(driver, monkeypatch) -> None:
    said = "launch of x failed: CUDA_ERROR_LAUNCH_FAILED"

    def refuse(*_: object) -> None:
        raise DriverError(said)

    monkeypatch.setattr(SparseDecodeRunner, "run", staticmethod(refuse))
    checks = selftest.run(0, driver)
    assert {check["detail"] for check in checks if "decode d" in check["name"]} == {said}
    assert all(check["ok"] for check in checks if "decode d" not in check["name"])


def test_two_launches_that_differ_are_found(driver, monkeypatch) -> None:
    counter = itertools.count()

    def unsteady(dtype: str, p) -> None:
        prefill(driver, TYPES[dtype], p)
        if next(counter) % 2:
            driver.memory[p.o_ptr][-2] ^= 1

    monkeypatch.setattr(SparsePrefillRunner, "run", staticmethod(unsteady))
    found = [check["detail"] for check in selftest.run(0, driver) if "prefill d" in check["name"]]
    assert set(found) == {"two launches gave different bits"}
