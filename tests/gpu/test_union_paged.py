"""The union over vLLM's paged cache, against the reference and against the union over dense K and V.

Every cell of the cache that no row may read holds NaN, the tokens past a request's end among them. As in `test_union`,
each test also reads which path the tiles took. "fp8_e4m3" is a type of the cache; everything else is bf16 then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import ATOL, DTYPES, Guarded, ints, normal, seeded
from test_union import Shared, attend
from test_union import pairs as pairs
from torch import Tensor
from union_cases import drifting, token_lists

from qsa_cute import union_layout
from qsa_cute.reference import attention as reference
from qsa_cute.runners import union_paged
from qsa_cute.runtime import default_loader

PAGE_SIZES = (16, 784, 1568, 3200, 7808)
GAIN = 2.0
CACHE_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}
FP8_GAIN = 3.7  # the values of an fp8 cache span a few binades; its scales bring them back to unit size
FP8_SCALES = (0.31, 0.27)
NAN_BYTE = 0x7F  # of e4m3

each_cache = pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])


@dataclass
class Paged:
    """q [rows, heads, D]; K and V [pages, page, kv_heads, D] of one interleaved tensor; counted lists."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    indices: Tensor
    block_table: Tensor
    token_to_req: Tensor
    gate: Tensor | None
    scales: tuple[float | Tensor, float | Tensor] = (1.0, 1.0)  # of K and V

    @property
    def dtype(self) -> str:
        return next(name for name, kind in CACHE_DTYPES.items() if kind == self.k_cache.dtype)

    def valid(self) -> Tensor:
        """bool [rows, width]: which entries count."""
        rows, width = self.indices.shape[0], self.indices.shape[1] - 1
        pages, page_size = self.k_cache.shape[:2]
        requests, table_width = self.block_table.shape
        tokens = self.indices[:, :width].long()
        request = self.token_to_req.long()[:, None].expand(rows, width)
        valid = torch.arange(width, device="cuda") < self.indices[:, width:]
        valid = valid & (tokens >= 0) & (tokens < table_width * page_size) & (request >= 0) & (request < requests)
        page = self.block_table[torch.where(valid, request, 0), torch.where(valid, tokens, 0) // page_size]
        return valid & (page >= 0) & (page < pages)

    def reference(self) -> tuple[Tensor, Tensor]:
        """FP32 (output, LSE), a request at a time from its tokens put together."""
        valid = self.valid()
        ids = torch.where(valid, self.indices[:, :-1], -1)
        out = torch.zeros(self.q.shape, device="cuda")
        lse = torch.full(self.q.shape[:2], -torch.inf, device="cuda")
        for request in range(len(self.block_table)):
            rows = (self.token_to_req == request).nonzero().flatten()
            pages = self.block_table[request].clamp(0, len(self.k_cache) - 1).long()
            k, v = (
                bytes_of(cache)[pages].view(cache.dtype).flatten(0, 1)[None] for cache in (self.k_cache, self.v_cache)
            )
            if self.dtype == "fp8_e4m3":
                k, v = (plane.float() * float(scale) for plane, scale in zip((k, v), self.scales, strict=True))
            lengths = ints([k.shape[1]])
            scale = self.q.shape[2] ** -0.5
            if len(rows):
                got = reference.sparse_prefill(self.q[None, rows], k, v, ids[None, rows], lengths, scale)
                out[rows], lse[rows] = got[0][0], got[1][0]
        if self.gate is not None:
            gated = out.to(self.q.dtype).float() * torch.sigmoid(self.gate.float())
            out = torch.where((lse > -torch.inf)[..., None], gated, 0)
        return out, lse

    def params(self, out: Tensor) -> SimpleNamespace:
        pages, page_size, kv_heads, head_dim = self.k_cache.shape
        strides = {
            f"{plane}_stride_{dim}": step
            for plane, cache in (("k", self.k_cache), ("v", self.v_cache))
            for dim, step in zip(("page", "token", "head"), cache.stride(), strict=False)
        }
        for name, tensor in (("q", self.q), ("o", out), ("gate", self.gate if self.gate is not None else out)):
            strides |= {f"{name}_stride_row": tensor.stride(0), f"{name}_stride_head": tensor.stride(1)}
        numbers = [1.0 if isinstance(scale, Tensor) else scale for scale in self.scales]
        pointers = [scale.data_ptr() if isinstance(scale, Tensor) else 0 for scale in self.scales]
        return SimpleNamespace(
            q_ptr=self.q.data_ptr(),
            k_ptr=self.k_cache.data_ptr(),
            v_ptr=self.v_cache.data_ptr(),
            o_ptr=out.data_ptr(),
            gate_ptr=0 if self.gate is None else self.gate.data_ptr(),
            indices=self.indices.data_ptr(),
            block_table=self.block_table.data_ptr(),
            token_to_req=self.token_to_req.data_ptr(),
            rows=self.q.shape[0],
            num_requests=self.block_table.shape[0],
            num_q_heads=self.q.shape[1],
            num_kv_heads=kv_heads,
            group_size=self.q.shape[1] // kv_heads,
            head_dim=head_dim,
            num_pages=pages,
            page_size=page_size,
            table_width=self.block_table.shape[1],
            width=self.indices.shape[1] - 1,
            attention_scale=head_dim**-0.5 * numbers[0],
            output_scale=numbers[1],
            k_scale_ptr=pointers[0],
            v_scale_ptr=pointers[1],
            indices_stride_row=self.indices.stride(0),
            table_stride=self.block_table.stride(0),
            stream=torch.cuda.current_stream().cuda_stream,
            device=torch.cuda.current_device(),
            **strides,
        )


@dataclass
class Run:
    out: Guarded
    memory: Guarded
    layout: object

    def rows_path(self) -> Tensor:
        """bool [tiles]."""
        found = next(part for part in self.layout.parts if part.name == "row_path")
        cells = self.memory.tensor[found.offset : found.offset + found.size]
        return (cells.view(torch.int32).view(found.shape) != 0).any(1)


def run(case: Paged, given: Run | None = None) -> Run:
    """From a workspace of 0xFF and outputs of NaN."""
    p = case.params(case.q)
    layout = union_paged.workspace(p)
    given = given or Run(Guarded(*case.q.shape, dtype=case.q.dtype), Guarded(layout.size, dtype=torch.uint8), layout)
    launch(case, case.params(given.out.tensor), given.memory.tensor)
    return given


def bytes_of(cache: Tensor) -> Tensor:
    """An fp8 cache as bytes, which can be indexed and filled; others as they are."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def launch(case: Paged, p: SimpleNamespace, memory: Tensor) -> None:
    assert union_paged.fits(p)
    loader = default_loader()
    union_paged.PagedLaunches(p, case.dtype, loader, memory.data_ptr()).run(p, loader)


def check(case: Paged, got: Run) -> None:
    want, lse = case.reference()
    out = got.out.tensor
    got.out.check()
    got.memory.check()
    assert (out[lse == -torch.inf] == 0).all(), "a row with no valid entry must be exact zeros"
    assert_near(out, want)


def assert_near(out: Tensor, want: Tensor) -> None:
    """With a gate the output is rounded twice: two units of bf16 beside the usual tolerance."""
    beyond = (out.float() - want).abs() - want.abs() * 2**-7
    assert beyond.max() <= ATOL, f"off by {beyond.max()} and a rounding"  # false for NaN


def check_shared(case: Paged) -> None:
    """Right, and every tile a union."""
    got = run(case)
    check(case, got)
    assert not got.rows_path().any(), "took the row path"


def check_odd(case: Paged) -> None:
    """Right, by the row path for some tiles and by the union for others."""
    got = run(case)
    check(case, got)
    assert got.rows_path().any(), "no tile took the row path"
    assert not got.rows_path().all(), "all tiles took the row path"


def paged(
    dtype: str = "bf16",
    head_dim: int = 256,
    group: int = 12,
    kv_heads: int = 2,
    lengths: tuple[int, ...] = (2048, 901, 1500),
    rows: tuple[int, ...] = (61, 40, 55),
    top: int = 64,
    rho: float = 0.95,
    page_size: int = 784,
    spare_pages: int = 1,
    gated: bool = True,
    poison: bool = True,
    seed: int = 0,
) -> Paged:
    """The last rows of each request. `spare_pages` of each table are past its tokens, and name what is not there."""
    generator, cache_kind = seeded(seed), CACHE_DTYPES[dtype]
    kind = DTYPES.get(dtype, torch.bfloat16)
    total, width = sum(rows), 4 * top + 3
    q = normal(generator, kind, total, kv_heads * group, head_dim) * GAIN
    gate = 2 * normal(generator, kind, total, kv_heads * group, head_dim) if gated else None
    used = [-(-length // page_size) for length in lengths]
    table_width = max(used) + spare_pages
    pages = sum(used) + 3
    cache = torch.randn(pages, kv_heads, page_size, 2 * head_dim, generator=generator, device="cuda")
    if dtype == "fp8_e4m3":
        cache = (cache * FP8_GAIN).clamp(-400, 400)
    cache = cache.to(cache_kind)
    k, v = (cache[..., i * head_dim : (i + 1) * head_dim].transpose(1, 2) for i in range(2))
    order = torch.randperm(pages, generator=generator, device="cuda").int()
    nowhere = ints([-1, pages, 2**31 - 1, -(2**31)])
    table = nowhere.repeat(-(-len(lengths) * table_width // 4))[: len(lengths) * table_width]
    table = table.view(len(lengths), table_width).clone()
    lists = []
    for request, (length, count, number) in enumerate(zip(lengths, rows, used, strict=True)):
        table[request, :number], order = order[:number], order[number:]
        blocks = drifting(count, length - count, length, top, rho, generator)
        padded = token_lists(blocks[None], ints([length - count]))[0]
        lists.append(counted(padded, length))
    requests = torch.repeat_interleave(torch.arange(len(rows), device="cuda"), ints(list(rows))).int()
    indices = torch.cat(lists)
    assert indices.shape[1] == width + 1
    case = Paged(q, k, v, indices, table, requests, gate, FP8_SCALES if dtype == "fp8_e4m3" else (1.0, 1.0))
    return poisoned(case) if poison else case


def counted(padded: Tensor, length: int) -> Tensor:
    """int32 [rows, width + 1]; what stands past the count is stale, and would be valid."""
    count = (padded >= 0).sum(-1, keepdim=True, dtype=torch.int32)
    place = torch.arange(padded.shape[-1], device="cuda")
    return torch.cat([torch.where(place < count, padded, ((place * 37) % length).int()), count], -1).contiguous()


def poisoned(case: Paged) -> Paged:
    """NaN in every cell of the cache that no entry names."""
    pages, page_size = case.k_cache.shape[:2]
    valid, tokens = case.valid(), case.indices[:, :-1].long()
    request = torch.where(valid, case.token_to_req.long()[:, None], 0)
    page = case.block_table[request, torch.where(valid, tokens, 0) // page_size].long()
    named = torch.zeros(pages * page_size + 1, dtype=torch.bool, device="cuda")
    named[torch.where(valid, page * page_size + tokens % page_size, pages * page_size).flatten()] = True
    unnamed = ~named[:-1].view(pages, page_size, 1, 1)
    for cache in (case.k_cache, case.v_cache):
        bytes_of(cache).masked_fill_(unnamed, NAN_BYTE if case.dtype == "fp8_e4m3" else torch.nan)
    return case


# Pages and requests.


@each_cache
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("rho", [0.0, 0.95, 0.999])
def test_pages(dtype, page_size, rho) -> None:
    """Permuted pages, requests of unequal lengths, tiles that hold the end of one and the beginning of the next."""
    check_shared(paged(dtype, page_size=page_size, rho=rho))


@pytest.mark.parametrize(("group", "kv_heads"), [(12, 1), (6, 1), (3, 1), (1, 2), (16, 1), (5, 3)])
@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_any_group(dtype, head_dim, group, kv_heads) -> None:
    case = paged(dtype, head_dim, group, kv_heads, rows=(70, 61, 80))
    got = run(case)
    check(case, got)
    assert got.rows_path().sum() <= (1 if group < 3 else 0), "took the row path"


@each_cache
def test_full_lists(dtype) -> None:
    check_shared(paged(dtype, lengths=(8192, 9000), rows=(64, 30), top=512, rho=0.99))


@each_cache
@pytest.mark.parametrize("rows", [(1,) * 40, (1, 2, 3, 4, 5, 6, 7, 8, 60), (100, 1, 1, 100), (11, 10, 11, 12, 80)])
def test_ragged_requests(dtype, rows) -> None:
    """Tiles of three requests or more go row by row."""
    lengths = tuple(700 + 97 * i for i in range(len(rows)))
    case = paged(dtype, lengths=lengths, rows=rows, page_size=112)
    got = run(case)
    check(case, got)
    owner = case.token_to_req.tolist()
    pairs = 12 * len(owner)
    tiles = [range(at, min(at + union_layout.PAIRS, pairs)) for at in range(0, pairs, union_layout.PAIRS)]
    many = [len({owner[pair // 12] for pair in tile}) > 2 for tile in tiles]
    assert got.rows_path().tolist() == many


@pytest.mark.parametrize("gated", [True, False])
def test_the_same_bits_as_over_dense_k_and_v(gated) -> None:
    """One request: the very tiles of the dense union; a gate only multiplies what that rounds."""
    case = paged(lengths=(2048,), rows=(100,), gated=gated, poison=False)
    pages = case.block_table[0, :-1].long()
    k, v = (cache[pages].flatten(0, 1)[None, :2048].contiguous() for cache in (case.k_cache, case.v_cache))
    scale = case.q.shape[2] ** -0.5
    dense = Shared(case.q[None], k, v, case.indices[None], ints([2048]), ints([1948]), scale, case.indices[None])
    dense.selection = lambda kind: case.indices[None]
    want = attend(dense, "counted")[0].o.tensor[0]
    got = run(case).out.tensor
    if gated:
        want = want.float() * torch.sigmoid(case.gate.float())
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-6)
    else:
        assert torch.equal(got, want)


@each_cache
def test_caches_of_their_own(dtype) -> None:
    """K and V in two tensors of different strides: the same bits as interleaved."""
    case = paged(dtype)
    wide = torch.full((*case.v_cache.shape[:3], 320), torch.nan, device="cuda").to(case.v_cache.dtype)
    bytes_of(wide)[..., :256] = bytes_of(case.v_cache)
    k = bytes_of(case.k_cache).contiguous().view(case.k_cache.dtype)
    apart = replace(case, k_cache=k, v_cache=wide[..., :256])
    assert torch.equal(run(apart).out.tensor, run(case).out.tensor)


@each_cache
def test_strided_rows(dtype) -> None:
    """Q, O, the gate, lists and tables in wider rows: the same bits."""
    case = paged(dtype)
    want = run(case).out.tensor
    rows, heads, dim = case.q.shape

    def widened(tensor: Tensor, extra: int) -> Tensor:
        wide = torch.full(
            (len(tensor), tensor.shape[1] + extra, *tensor.shape[2:]), 3, dtype=tensor.dtype, device="cuda"
        )
        wide[:, : tensor.shape[1]] = tensor
        return wide[:, : tensor.shape[1]]

    strided = replace(case, q=widened(case.q, 4), gate=widened(case.gate, 2))
    strided = replace(strided, indices=widened(case.indices, 5), block_table=widened(case.block_table, 3))
    wide = torch.full((rows, heads + 2, dim), 3.0, dtype=case.q.dtype, device="cuda")
    memory = torch.full((union_paged.workspace(case.params(case.q)).size,), 0xFF, dtype=torch.uint8, device="cuda")
    launch(strided, strided.params(wide[:, 1:-1]), memory)
    assert torch.equal(wide[:, 1:-1], want)
    assert (wide[:, [0, -1]] == 3.0).all()


@each_cache
@pytest.mark.parametrize(("group", "page_size"), [(12, 1600), (3, 784), (6, 16)])
def test_wide_tables(dtype, group, page_size) -> None:
    """Room for 262,144 tokens a request, one of which has so many."""
    spare = 262_144 // page_size - 2
    check_shared(paged(dtype, group=group, kv_heads=1, page_size=page_size, spare_pages=spare))
    case = paged(
        dtype, group=group, kv_heads=1, lengths=(262_144, 3000), rows=(60, 70), page_size=page_size, rho=0.99, top=256
    )
    check_shared(case)


@each_cache
def test_a_million_tokens(dtype) -> None:
    """Bitmaps take turns; in tiles of two requests none may fit."""
    case = paged(dtype, group=6, kv_heads=1, lengths=(1_000_000, 990_000), rows=(60, 70), page_size=3200, rho=0.99)
    got = run(case)
    check(case, got)
    assert got.rows_path().sum() <= 1, "took the row path"


# Odd requests, pages and lists.


@each_cache
def test_requests_that_do_not_exist(dtype) -> None:
    """Rows of none, before, between and after others, their queries and gates NaN."""
    case = paged(dtype)
    requests = case.token_to_req.clone()
    requests[:7], requests[61:80], requests[150:] = -1, 3, 2**31 - 1
    dead = (requests < 0) | (requests >= 3)
    case.q[dead], case.gate[dead] = torch.nan, torch.nan
    case = poisoned(replace(case, token_to_req=requests))
    got = run(case)
    check(case, got)
    assert (got.out.tensor[dead] == 0).all()
    assert got.rows_path().sum() <= 1


@each_cache
def test_pages_that_are_not_there(dtype) -> None:
    """Unmapped pages within a request mask their blocks, whole and partial ones."""
    case = paged(dtype, page_size=112)
    pages = len(case.k_cache)
    table = case.block_table.clone()
    last = [-(-length // 112) - 1 for length in (2048, 901, 1500)]
    table[0, 1], table[0, 4], table[1, 2], table[1, last[1]] = -1, pages, 2**31 - 1, -(2**31)
    check_shared(poisoned(replace(case, block_table=table)))


@each_cache
def test_tokens_past_the_table(dtype) -> None:
    case = paged(dtype, spare_pages=0, page_size=112)
    reach = case.block_table.shape[1] * 112
    for i, bad in enumerate((reach, reach + 3, reach + 112, 2**31 - 1, -2, -(2**31), 1 << 24)):
        case.indices[7 * i, 9 + i] = bad
        case.indices[7 * i + 3, 12:16] = ints([reach, reach + 1, reach + 2, reach + 3])
    check(case := poisoned(case), run(case))


@each_cache
def test_duplicates_holes_and_counts(dtype) -> None:
    case = paged(dtype, rows=(100, 40, 55), poison=False)
    lists = case.indices
    lists[10, 3], lists[11, 40] = -1, -1  # holes: still a union
    lists[30, 4:8] = lists[30, 8:12]  # a block twice
    lists[70, 0] = lists[70, 1]  # a token twice
    lists[120, -1], lists[121, -1], lists[122, -1] = -7, 0, 1
    lists[150, -1] = lists.shape[1] + 1000
    lists[150, :-1] = torch.arange(lists.shape[1] - 1, device="cuda").int()
    check_odd(poisoned(case))


@pytest.mark.parametrize(("dtype", "value"), [("bf16", torch.nan), ("bf16", torch.inf), ("fp8_e4m3", NAN_BYTE)])
def test_only_the_row_that_lists_a_token_sees_its_value(dtype, value) -> None:
    """A V that is not finite, in one row's list alone: all other rows of its tile stay right."""
    case = paged(dtype)
    valid, tokens = case.valid(), case.indices[:, :-1]
    first = (case.token_to_req == 0)[:, None] & valid
    hits = torch.zeros(2048, dtype=torch.int64, device="cuda").scatter_add_(
        0, tokens[first].long(), torch.ones_like(tokens[first].long())
    )
    token = int((hits == 1).nonzero()[0])
    owner = int(((tokens == token) & first).any(-1).nonzero()[0])
    want, _ = case.reference()
    bytes_of(case.v_cache)[int(case.block_table[0, token // 784]), token % 784] = value
    got = run(case)
    others = torch.arange(len(case.q), device="cuda") != owner
    assert not got.out.tensor[owner].isfinite().all()
    assert_near(got.out.tensor[others], want[others])
    assert got.rows_path().any()


@each_cache
def test_nothing_selected(dtype) -> None:
    case = paged(dtype)
    case.indices[:, -1] = 0
    check_shared(poisoned(case))


# Repetition, workspaces, graphs.


def odd_case(dtype: str, seed: int = 0, rho: float = 0.95) -> Paged:
    """Tiles of each path."""
    case = paged(dtype, rho=rho, seed=seed, poison=False)
    case.indices[30, 4:8] = case.indices[30, 8:12]
    return case


@each_cache
def test_the_workspace_may_hold_anything_and_runs_repeat(dtype) -> None:
    case = poisoned(odd_case(dtype))
    given = run(case)
    first = given.out.tensor.clone()
    for byte in (0x00, 0x7F, 0xFF, None, 0xFF):
        if byte is None:
            given.memory.tensor.random_(generator=seeded(3))
        else:
            given.memory.tensor.fill_(byte)
        given.out.tensor.fill_(torch.nan)
        run(case, given)
        assert torch.equal(given.out.tensor, first)
        given.memory.check()


@each_cache
def test_replays_with_changing_inputs(dtype) -> None:
    """One graph over fixed tensors, three sets of inputs in turn; every replay gives the bits of a plain run."""
    cases = [odd_case(dtype, seed, rho) for seed, rho in enumerate((0.9, 0.99, 0.0))]
    cases[1].token_to_req[61:75] = 0
    cases[2].token_to_req[140:] = -1
    wanted = [run(case).out.tensor for case in cases]
    fixed = odd_case(dtype, 9)
    given = run(fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(fixed, given)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(30):
        case = cases[i % 3]
        for name in ("q", "k_cache", "v_cache", "indices", "block_table", "token_to_req", "gate"):
            getattr(fixed, name).copy_(getattr(case, name))
        if i % 10 == 0:
            given.memory.tensor.fill_(0xFF)
        graph.replay()
        wrong += (given.out.tensor.view(torch.int16) != wanted[i % 3].view(torch.int16)).any()
    assert wrong.item() == 0


def test_scales_on_the_device() -> None:
    """Read there: the same bits as from numbers."""
    case = paged("fp8_e4m3", poison=False)
    case.indices[30, 4:8] = case.indices[30, 8:12]  # a tile goes row by row
    scales = tuple(torch.tensor(scale, device="cuda") for scale in (0.5, 0.25))  # exact, in either order of products
    got = run(replace(case, scales=scales))
    assert got.rows_path().any()
    assert torch.equal(got.out.tensor, run(replace(case, scales=(0.5, 0.25))).out.tensor)


@each_cache
def test_the_gate_matters(dtype) -> None:
    """Control: without the gate the result is far off."""
    case = paged(dtype)
    want, _ = case.reference()
    assert (run(replace(case, gate=None)).out.tensor.float() - want).abs().max() > 10 * ATOL
