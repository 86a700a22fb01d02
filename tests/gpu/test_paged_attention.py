"""Paged attention against the reference and against vLLM's own kernels, over everything a cache and a list may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import BLOCK_KINDS, GROUPS, Guarded
from paged_cases import CACHE_DTYPES, Paged, moved_far, paged
from peer import needs_vllm, vllm

from qsa_cute.errors import ArgumentError, CaptureError
from qsa_cute.hosts import vllm_attention as host
from qsa_cute.runners.paged_attention import PagedAttentionRunner
from qsa_cute.runtime import Loader

ATOL = 2e-2
SPLITS = [
    *(("tma", n) for n in range(1, 17)),
    *(("rows", n) for n in (1, 2, 8, 32)),
]
LISTS = (*BLOCK_KINDS, "cut")

each_type = pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
each_path = pytest.mark.parametrize(("algorithm", "splits"), [("tma", 1), ("tma", 5), ("rows", 3), ("rows", 1)])


def check(case: Paged, out: Guarded) -> None:
    out.check()
    want = case.reference()
    got = out.tensor.float()
    dead = (want == 0).all(-1)
    assert (got[dead] == 0).all(), "rows without an entry must be exact zeros"
    # Two roundings to bf16 of values of up to 4, in rows of one entry.
    beyond = (got - want).abs() - (ATOL / 2 + want.abs() / 100)
    assert beyond.max().item() <= 0, f"beyond the tolerance by {beyond.max().item()}"  # false for NaN


def run(case: Paged, algorithm: str | None, splits: int = 0, **changes: object) -> Guarded:
    workspace = case.workspace() if algorithm == "rows" and splits > 1 else {}
    out = case.run(algorithm=algorithm, num_splits=splits, **workspace, **changes)
    if workspace:
        assert (workspace["split_counters"] == 0).all(), "split counters must be left zero"
    return out


@each_type
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [256, 128])
@pytest.mark.parametrize(("algorithm", "splits"), [("tma", 3), ("tma", 1), ("rows", 1)])
def test_matches_the_reference(cache_dtype, head_dim, group, algorithm, splits) -> None:
    case = paged(cache_dtype, head_dim, group)
    check(case, run(case, algorithm, splits))


@each_type
@pytest.mark.parametrize(("algorithm", "splits"), SPLITS)
def test_any_number_of_splits(cache_dtype, algorithm, splits) -> None:
    case = paged(cache_dtype, rows=16)
    check(case, run(case, algorithm, splits))


@each_type
@each_path
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("head_dim", [256, 128])
def test_lists_of_blocks(cache_dtype, head_dim, kind, algorithm, splits) -> None:
    """Whole blocks and what is nearly one, at each place in a page, with pages missing; what is stale would make whole
    blocks of those that the count cuts."""
    lengths = (0, 1, 3, 4, 5, 7, 130, 2048, 2051, 5000)
    case = paged(cache_dtype, head_dim, lengths=lengths, rows=20, page_size=48, kinds=(kind, "blocks"))
    check(case, run(case, algorithm, splits))


@each_type
@pytest.mark.parametrize("splits", [1, 2, 3, 9, 16])
@pytest.mark.parametrize("kind", LISTS)
def test_boxes_with_any_number_of_splits(cache_dtype, kind, splits) -> None:
    """Lists that end anywhere in a stage and in a step: what lies past the end is not even zeros."""
    lengths = tuple(range(1900, 1900 + 37 * 9, 37))
    case = paged(cache_dtype, lengths=lengths, rows=len(lengths), page_size=1568, kinds=(kind,))
    first = run(case, "tma", splits)
    check(case, first)
    assert torch.equal(run(case, "tma", splits).tensor, first.tensor)


@each_type
@pytest.mark.parametrize("rows", [6, 12, 13])
def test_whose_request_a_row_is(cache_dtype, rows) -> None:
    """In order, as many rows of each, which is what the kernel reckons with; and in any other order."""
    case = paged(cache_dtype, rows=rows, kinds=("blocks",))
    for one in (case, by_request(case)):
        check(one, run(one, "tma", 3))


@each_type
@pytest.mark.parametrize("width", [1023, 1024, 1025])
def test_block_tables_in_and_out_of_shared_memory(cache_dtype, width) -> None:
    case = paged(cache_dtype, lengths=(3000, 700), rows=5, kinds=("mixed", "blocks"))
    wide = torch.full((2, width), 2**31 - 1, dtype=torch.int32, device="cuda")
    wide[:, : case.block_table.shape[1]] = case.block_table
    check(replace(case, block_table=wide), run(replace(case, block_table=wide), "tma", 3))


@each_type
def test_a_cache_without_tensor_maps(cache_dtype) -> None:
    """Both KV heads at one place: not by boxes, but by what takes it; through a workspace where that is given."""
    case = paged(cache_dtype)
    k, v = (cache.float().nan_to_num(nan=0.0).to(cache.dtype) for cache in (case.k_cache, case.v_cache))
    case = replace(case, k_cache=k[:, :, :1].expand(*k.shape), v_cache=v[:, :, :1].expand(*v.shape))
    check(case, run(case, None))
    assert torch.equal(run(case, None).tensor, run(case, "rows", 1).tensor)
    params = case.params(torch.empty_like(case.q))
    assert PagedAttentionRunner.workspace_wanted(params) == PagedAttentionRunner.workspace_size(12, 2, 256)
    with pytest.raises(ArgumentError, match="Algorithm 'tma' takes what lies apart"):
        run(case, "tma")


@each_path
@pytest.mark.parametrize("page_size", [16, 48, 400, 784, 800, 1568, 1600, 3200, 7808])
def test_any_page_size(page_size, algorithm, splits) -> None:
    for cache_dtype in CACHE_DTYPES:
        case = paged(cache_dtype, group=3, page_size=page_size, lengths=(9000, 400, 17), rows=9)
        check(case, run(case, algorithm, splits))


@each_type
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 2), (12, 1), (6, 1), (3, 1)])
@pytest.mark.parametrize("rows", [1, 4, 16, 33, 70, 140])
def test_what_the_runner_picks(cache_dtype, heads, kv_heads, rows) -> None:
    case = paged(cache_dtype, group=heads // kv_heads, kv_heads=kv_heads, rows=rows)
    check(case, run(case, None))


@each_path
@pytest.mark.parametrize("width", [1, 7, 8, 63, 64, 65, 257, 2048, 8192])
def test_any_width_of_the_list(width, algorithm, splits) -> None:
    case = paged(width=width, lengths=(9000, 3, 700))
    check(case, run(case, algorithm, splits))


@each_type
@each_path
def test_separate_caches_and_strided_rows(cache_dtype, algorithm, splits) -> None:
    """Planes of their own, Q and gate inside wider rows, lists inside wider ones: the bits of the dense case."""
    case = paged(cache_dtype, interleaved=False)
    want = run(case, algorithm, splits).tensor
    wide = torch.full((*case.q.shape[:2], 3 * 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[..., :256], wide[..., 256:512] = case.q, case.gate
    lists = torch.full((case.indices.shape[0], 2060), 3, dtype=torch.int32, device="cuda")
    lists[:, : case.indices.shape[1]] = case.indices
    table = torch.full((case.block_table.shape[0], 40), 5, dtype=torch.int32, device="cuda")
    table[:, : case.block_table.shape[1]] = case.block_table
    changed = replace(
        case,
        q=wide[..., :256],
        gate=wide[..., 256:512],
        indices=lists[:, : case.indices.shape[1]],
        block_table=table[:, : case.block_table.shape[1]],
    )
    assert torch.equal(run(changed, algorithm, splits).tensor, want)
    other = paged(cache_dtype, interleaved=True)
    assert torch.equal(run(other, algorithm, splits).tensor, want)


@each_type
@each_path
def test_without_a_gate(cache_dtype, algorithm, splits) -> None:
    case = replace(paged(cache_dtype), gate=None)
    check(case, run(case, algorithm, splits))


@each_path
def test_scales_on_the_device(algorithm, splits) -> None:
    case = paged("fp8_e4m3")
    want = run(case, algorithm, splits).tensor
    k_scale, v_scale = (torch.tensor(value, device="cuda") for value in (case.k_scale, case.v_scale))
    on_device = replace(case, k_scale=k_scale, v_scale=v_scale.view(1))
    assert (run(on_device, algorithm, splits).tensor.float() - want.float()).abs().max() <= 1e-2


@each_type
@each_path
def test_nothing_is_mapped(cache_dtype, algorithm, splits) -> None:
    case = paged(cache_dtype)
    for bad in (-1, -(2**31), case.k_cache.shape[0], 2**31 - 1):
        case.block_table.fill_(bad)
        case.gate.fill_(torch.nan)
        assert (run(case, algorithm, splits).tensor == 0).all()


@each_type
@each_path
def test_a_count_past_the_list_is_cut(cache_dtype, algorithm, splits) -> None:
    case = paged(cache_dtype, kinds=("full",), lengths=(3000,))
    want = run(case, algorithm, splits).tensor
    case.indices[:, -1] = 2**31 - 1
    assert torch.equal(run(case, algorithm, splits).tensor, want)


@each_type
@each_path
def test_a_cache_past_2_to_the_31_elements(cache_dtype, algorithm, splits) -> None:
    case = paged(cache_dtype)
    want = run(case, algorithm, splits).tensor
    assert torch.equal(run(moved_far(case), algorithm, splits).tensor, want)


@each_type
@each_path
def test_two_runs_give_the_same_bits(cache_dtype, algorithm, splits) -> None:
    case = paged(cache_dtype, rows=40)
    first = run(case, algorithm, splits).tensor
    for _ in range(5):
        assert torch.equal(run(case, algorithm, splits).tensor, first)


@each_type
def test_prefill_rows(cache_dtype) -> None:
    """More rows than blocks fit at once."""
    case = paged(cache_dtype, group=6, kv_heads=1, rows=600, width=515, lengths=(700, 5000, 12))
    check(case, run(case, None))


def by_request(case: Paged) -> Paged:
    """Rows of a request side by side, as prefill has them."""
    order = case.token_to_req.long().argsort(stable=True)
    moved = {name: getattr(case, name)[order] for name in ("q", "indices", "token_to_req", "gate")}
    return replace(case, **moved)


@each_type
@pytest.mark.parametrize(("group", "kv_heads", "page_size"), [(12, 2, 1568), (12, 1, 784), (6, 1, 3200), (3, 1, 16)])
def test_many_rows_share_their_gather(cache_dtype, group, kv_heads, page_size) -> None:
    """The host brings the union's memory by itself; the lists hold all that lists may hold."""
    case = by_request(paged(cache_dtype, group=group, kv_heads=kv_heads, page_size=page_size, rows=300))
    out = Guarded(*case.q.shape, dtype=case.q.dtype)
    wanted = PagedAttentionRunner.workspace_wanted(case.params(out.tensor))
    assert wanted is not None
    memory = torch.full((wanted.size,), 0xFF, dtype=torch.uint8, device="cuda")
    params = case.params(out.tensor).with_workspace(wanted.addresses(memory.data_ptr()))
    assert params.algorithm == "shared"
    for _ in range(2):
        out.tensor.fill_(torch.nan)
        PagedAttentionRunner.run(params)
        check(case, out)
    assert torch.equal(call(case), out.tensor)
    assert torch.equal(call(case), out.tensor)  # the layout is known now


@each_type
def test_few_rows_do_not_share(cache_dtype) -> None:
    case = paged(cache_dtype, rows=100)
    assert PagedAttentionRunner.workspace_wanted(case.params(torch.empty_like(case.q))) is None
    check(case, case.run())


@each_type
def test_shared_rows_in_a_graph(cache_dtype) -> None:
    case = by_request(paged(cache_dtype, rows=300))
    out, want = torch.full_like(case.q, torch.nan), call(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call(case, out)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def test_no_rows() -> None:
    case = paged()
    empty = replace(
        case, q=case.q[:0], indices=case.indices[:0], token_to_req=case.token_to_req[:0], gate=case.gate[:0]
    )
    PagedAttentionRunner.run(empty.params(torch.empty_like(empty.q)))


# The host's functions.


def call(case: Paged, out: torch.Tensor | None = None, prefill: bool = False, module: object = host) -> torch.Tensor:
    heads, dim = case.q.shape[1:]
    gate = case.gate.reshape(-1, heads * dim)
    scales = {} if case.k_scale is None else {"k_scale": case.k_scale, "v_scale": case.v_scale}
    return module.qsa_sparse_paged_attention(*case.inputs, prefill, out, output_gate=gate, **scales)


@needs_vllm
@each_type
@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size", "rows"), [(24, 2, 1568, 90), (12, 1, 1600, 3), (6, 1, 784, 90), (3, 1, 400, 3)]
)
def test_agrees_with_vllm(cache_dtype, heads, kv_heads, page_size, rows) -> None:
    """On the same inputs, but for what theirs reads and ours does not: NaN behind invalid entries, and the entries past
    the count in the tile that it ends in."""
    case = paged(cache_dtype, group=heads // kv_heads, kv_heads=kv_heads, page_size=page_size, rows=rows)
    for cache in (case.k_cache, case.v_cache):
        cache.copy_(cache.float().nan_to_num(nan=0.0).to(cache.dtype))
    case.gate.nan_to_num_(nan=1.0)
    width = case.indices.shape[1] - 1
    past = torch.arange(width, device="cuda") >= case.indices[:, -1:]
    case.indices[:, :width].masked_fill_(past, -1)
    theirs = call(case, module=vllm("attention"))
    assert (call(case).float() - theirs.float()).abs().max() <= ATOL


@each_type
def test_the_host_allocates_and_fills(cache_dtype) -> None:
    case = paged(cache_dtype)
    out = Guarded(*case.q.shape, dtype=case.q.dtype)
    assert call(case, out.tensor) is out.tensor
    check(case, out)
    for prefill in (False, True):
        fresh = call(case, prefill=prefill)
        assert fresh.shape == case.q.shape
        assert torch.equal(fresh, out.tensor)


@each_type
@pytest.mark.parametrize("rows", [3, 80])
def test_capture_and_replay(cache_dtype, rows) -> None:
    case = paged(cache_dtype, rows=rows)
    out = torch.full_like(case.q, torch.nan)
    want = call(case)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(case, out)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
    case.q.copy_(case.q.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call(case))


def test_a_first_use_under_capture_is_refused(monkeypatch) -> None:
    fresh = Loader()
    monkeypatch.setattr("qsa_cute.runners.paged_attention.default_loader", lambda: fresh)
    case, graph, mark = paged(), torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="preflight"):
            case.run()
        mark.add_(1)
    graph.replay()
    assert mark.item() == 1


def test_the_warm_up_loads_what_will_run(monkeypatch) -> None:
    fresh = Loader()
    monkeypatch.setattr("qsa_cute.runners.paged_attention.default_loader", lambda: fresh)
    case = paged(rows=3)
    storage = torch.zeros(4, 2, 784, 512, dtype=torch.bfloat16, device="cuda")
    warmed = host.warmup_qsa_sparse_paged_attention(storage, case.block_table, num_query_heads=24, selection_width=2051)
    assert warmed
    assert all(len(one) == 3 for one in warmed)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(case.q)
    with torch.cuda.graph(graph):
        call(case, out)
    graph.replay()
    assert torch.equal(out, call(case))
