"""Selection over vLLM's compressed key cache: kernels against the reference, host functions against the reference and
vLLM's own Triton functions on the same inputs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Guarded, ints, seeded
from indexer_cases import LOGIT_ATOL, LOGIT_RTOL, bits
from paged_select_cases import (
    DEVICE,
    DTYPES,
    RATIO,
    TOKEN_TOPK,
    Paged,
    check_ids,
    fill,
    ids,
    paged,
    short_rows,
)
from peer import needs_vllm, vllm
from torch import Tensor

from qsa_cute.geometry import TOP_BLOCKS
from qsa_cute.hosts import vllm_select as host
from qsa_cute.reference import paged_select as reference
from qsa_cute.runners.checks import dtype_name
from qsa_cute.runners.paged_select import PagedScores, PagedScoresDecode, PagedSelectDecode, select_ids

# wgmma's fp8 sums keep about 14 bits of the largest addend: up to 0.015 on logits of up to 60, as vLLM's own.
FP8_WGMMA_ATOL = 3e-2
needs_sm90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="clusters are SM90's"
)
PAGES = (4, 12, 196, 392, 400, 800, 1952)
TYPES = pytest.mark.parametrize("dtype", DTYPES)
RAGGED = (  # what each row sees, request by request
    tuple(range(900, 1031)),
    (1, 2, 3),
    tuple(range(2000, 2040)),
    (),
    (65,),
    tuple(range(500, 530)),
)


def steps(columns: tuple[int, ...], query_len: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(max(0, c - query_len + 1 + j) for j in range(query_len)) for c in columns)


def fields(case: Paged, logits: Guarded, lengths: Guarded) -> dict[str, object]:
    return {
        "q_ptr": case.q.data_ptr(),
        "k_cache_ptr": case.k_cache.data_ptr(),
        "page_table": case.page_table.data_ptr(),
        "visible_blocks": case.visible.data_ptr(),
        "logits_ptr": logits.tensor.data_ptr(),
        "lengths_ptr": lengths.tensor.data_ptr(),
        "num_pages": case.k_cache.shape[0],
        "page_size": case.k_cache.shape[1],
        "table_width": case.page_table.shape[1],
        "dtype": dtype_name(case.q.dtype),
        "num_heads": case.q.shape[1],
        "q_stride_row": case.q.stride(0),
        "q_stride_head": case.q.stride(1),
        "cache_stride_page": case.k_cache.stride(0),
        "cache_stride_token": case.k_cache.stride(1),
        "page_table_stride": case.page_table.stride(0),
    }


def decode_scores(case: Paged) -> tuple[Guarded, Guarded]:
    logits, lengths = Guarded(case.rows, case.columns, dtype=torch.float32), Guarded(case.rows, dtype=torch.int32)
    requests = case.page_table.shape[0]
    PagedScoresDecode(num_requests=requests, query_len=case.query_len, **fields(case, logits, lengths)).run()
    return logits, lengths


def prefill_scores(case: Paged, algorithm: str | None = None, columns: int | None = None, **chunk: int):
    columns = columns or case.columns
    rows = chunk.get("num_rows", case.rows)
    logits, lengths = Guarded(rows, columns, dtype=torch.float32), Guarded(rows, dtype=torch.int32)
    PagedScores(
        query_start_loc=case.query_start_loc.data_ptr(),
        num_requests=case.page_table.shape[0],
        total_rows=case.rows,
        num_columns=columns,
        algorithm=algorithm,
        **chunk,
        **fields(case, logits, lengths),
    ).run()
    return logits, lengths


def check_scores(found: Guarded, lengths: Guarded, want: Tensor, atol: float = LOGIT_ATOL) -> None:
    """Within tolerance of FP64 logits, and unwritten where those are NaN."""
    found.check()
    lengths.check()
    unseen = want.isnan()
    assert (bits(found.tensor)[unseen] == -1).all(), "a logit that the row does not see was written"
    assert torch.equal(lengths.tensor, RATIO * (~unseen).sum(1).int())
    torch.testing.assert_close(found.tensor[~unseen].double(), want[~unseen], rtol=LOGIT_RTOL, atol=atol)


# Scores.


@TYPES
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("query_len", [1, 3, 8])
def test_scores_decode(dtype, page, query_len):
    columns = (2 * page + 5, 2 * page, 0, 777, 31, 1)
    case = short_rows(paged(dtype, page, steps(columns, query_len), seed=page, broken=page > 12))
    check_scores(*decode_scores(case), case.logits())


@TYPES
@pytest.mark.parametrize("algorithm", ["mma", "wgmma"])
@pytest.mark.parametrize("page", PAGES)
def test_scores_prefill(dtype, algorithm, page):
    case = short_rows(paged(dtype, page, RAGGED, base=1000, seed=page, broken=page in (196, 392)))
    atol = FP8_WGMMA_ATOL if dtype == "fp8" and algorithm == "wgmma" else LOGIT_ATOL
    check_scores(*prefill_scores(case, algorithm), case.logits(), atol)


@pytest.mark.parametrize("algorithm", ["mma", "wgmma"])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_fewer_heads(algorithm, heads):
    case = paged("bf16", 392, RAGGED, heads=heads)
    check_scores(*prefill_scores(case, algorithm), case.logits())
    case = paged("bf16", 392, steps((800, 3), 2), heads=heads)
    check_scores(*decode_scores(case), case.logits())


@pytest.mark.parametrize("algorithm", ["mma", "wgmma"])
def test_a_chunk_is_its_rows_of_the_whole(algorithm):
    case = paged("bf16", 196, RAGGED, base=7)
    whole, lengths = prefill_scores(case, algorithm)
    for start, rows in ((0, 1), (100, 64), (130, 75)):
        part, part_lengths = prefill_scores(case, algorithm, row_start=start, num_rows=rows)
        assert torch.equal(bits(part.tensor), bits(whole.tensor[start : start + rows]))
        assert torch.equal(part_lengths.tensor, lengths.tensor[start : start + rows])


def test_many_requests():
    """More than a warp finds at once, of lengths around a tile's."""
    sizes = [(0, 1, 63, 64, 65, 127, 128, 129)[b % 8] for b in range(70)]
    case = paged("bf16", 196, tuple(tuple(range(40, 40 + n)) for n in sizes), extra_pages=0)
    for algorithm in ("mma", "wgmma"):
        check_scores(*prefill_scores(case, algorithm, max_query_len=129), case.logits())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_prefill_and_decode_have_the_same_bits(dtype):
    case = paged(dtype, 392, steps((1500, 2000, 700), 4))
    logits = [decode_scores(case)[0], prefill_scores(case, "mma")[0], prefill_scores(case, "wgmma")[0]]
    assert torch.equal(bits(logits[0].tensor), bits(logits[1].tensor))
    assert torch.equal(bits(logits[0].tensor), bits(logits[2].tensor))


@pytest.mark.parametrize("algorithm", ["mma", "wgmma"])
def test_heads_cancel_before_they_are_summed(algorithm):
    """A head is ReLU'd by itself: the negative of another one adds nothing."""
    case = paged("bf16", 196, ((600,) * 130,))
    case.q[:, 1].copy_(-case.q[:, 0])
    check_scores(*prefill_scores(case, algorithm), case.logits())


def test_rows_of_no_request_see_nothing():
    case = paged("bf16", 196, RAGGED)
    case.query_start_loc[-1] -= 10
    logits, lengths = prefill_scores(case)
    check_scores(logits, lengths, case.logits())
    assert not lengths.tensor[-10:].any()


# Selection.


def select_decode(case: Paged) -> Tensor:
    out = ids(case.rows)
    host.qsa_select_paged_decode(
        case.q, case.k_cache, case.page_table, case.visible, TOKEN_TOPK, RATIO, case.query_len, out.tensor
    )
    out.check()
    return out.tensor


def select_prefill(case: Paged, max_seq_len: int | None = None) -> Tensor:
    out = ids(case.rows)
    longest = int(case.query_start_loc.diff().max())
    seen = RATIO * int(case.visible.max()) if max_seq_len is None else max_seq_len
    host.qsa_select_paged_prefill(
        case.q,
        case.k_cache,
        case.page_table,
        case.query_start_loc,
        case.visible,
        TOKEN_TOPK,
        RATIO,
        longest,
        out.tensor,
        seen,
    )
    out.check()
    return out.tensor


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("query_len", [1, 5])
def test_select_decode(dtype, query_len, poison):
    columns = (16000, 700, 512, 513, 9000, 3)
    case = short_rows(paged(dtype, 400, steps(columns, query_len), poison=poison, broken=True))
    found = select_decode(case)
    check_ids(found, case, case.logits())
    assert torch.equal(found, select_decode(case)), "not the same ids twice"


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_select_prefill(dtype, monkeypatch):
    rows = (tuple(range(15000, 15200)), tuple(range(400, 700)), (3,))
    case = short_rows(paged(dtype, 800, rows, base=12345))
    found = select_prefill(case)
    check_ids(found, case, case.logits())
    assert torch.equal(found, select_prefill(case)), "not the same ids twice"
    assert torch.equal(found, select_prefill(case, max_seq_len=4 * case.columns)), "width must not matter"
    monkeypatch.setenv(host.MAX_LOGITS_MB, "8")  # 128 rows of 15232 columns
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert torch.equal(found, select_prefill(case)), "chunks must not matter"
    assert torch.cuda.max_memory_allocated() - before < 12 << 20


def one_launch(case: Paged, ranks: int | None = None) -> Tensor:
    """Scores and selection in one launch, whatever the host would choose."""
    out = ids(case.rows)
    given = {name: value for name, value in fields(case, out, out).items() if name not in ("logits_ptr", "lengths_ptr")}
    requests = case.page_table.shape[0]
    launch = PagedSelectDecode(
        num_requests=requests, query_len=case.query_len, out_ptr=out.tensor.data_ptr(), ranks=ranks, **given
    )
    launch.run()
    out.check()
    return out.tensor


def two_launches(case: Paged) -> Tensor:
    """The selection, by itself, of the scores, by themselves."""
    out = ids(case.rows)
    logits, lengths = Guarded(case.rows, case.columns, dtype=torch.float32), Guarded(case.rows, dtype=torch.int32)
    scores = PagedScoresDecode(
        num_requests=case.page_table.shape[0], query_len=case.query_len, **fields(case, logits, lengths)
    )
    scores.run()
    select_ids(scores, case.rows, out.tensor.data_ptr(), TOP_BLOCKS).run()
    return out.tensor


@needs_sm90
@TYPES
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("longest", [2400, 16400])
def test_one_launch_selects_what_two_do(dtype, query_len, longest):
    """To the bit, over every number of ranks, lengths around a step's, a warp's and a selection's, and broken pages."""
    columns = (longest - 1, 700, 512, 513, 514, 1023, 1500, 1, 0)
    case = short_rows(paged(dtype, 400, steps(columns, query_len), broken=True))
    want = two_launches(case)
    check_ids(want, case, case.logits())
    for ranks in (2, 3, 8, 16):
        assert torch.equal(one_launch(case, ranks), want), f"{ranks} ranks"
    assert torch.equal(one_launch(case), one_launch(case))


@needs_sm90
@pytest.mark.parametrize("requests", [1, 70, 300])
def test_one_launch_of_many_requests(requests):
    case = paged("bf16", 400, steps(tuple(100 + 2300 * i // requests for i in range(requests)), 1), extra_pages=0)
    assert torch.equal(one_launch(case), two_launches(case))


@needs_sm90
@pytest.mark.parametrize("heads", [1, 3])
def test_one_launch_breaks_ties_as_two_do(heads):
    """Zeros beyond those that a histogram tells apart, and rows that are all ties."""
    case = paged("bf16", 392, steps((2300, 3000, 1000), 2), heads=heads)
    case.q[1:4].zero_()
    case.q[0].mul_(1e-30)
    case.q[4:, 0].copy_(-case.q[4:, -1])
    assert torch.equal(one_launch(case), two_launches(case))


def test_ties_go_to_the_lower_block():
    case = paged("bf16", 392, ((3000,) * 3,))
    case.q.zero_()
    want = torch.arange(TOP_BLOCKS, dtype=torch.int32, device=DEVICE).expand(3, -1)
    assert torch.equal(select_prefill(case), want)
    assert torch.equal(select_decode(case), want)


def test_no_rows_and_no_columns():
    case = paged("bf16", 196, ((10, 10),))
    empty = replace(case, q=case.q[:0], visible=case.visible[:0])
    select_decode(replace(empty, page_table=case.page_table[:0]))
    select_prefill(empty, 40)
    lists = torch.empty(0, 2052, dtype=torch.int32, device=DEVICE)
    host.expand_qsa_block_indices(ids(0).tensor, ints([]), ints([]), RATIO, TOKEN_TOPK, lists)
    nothing = replace(case, page_table=case.page_table[:, :0])
    assert (select_decode(replace(nothing, query_len=2)) == -1).all()
    assert (select_prefill(nothing, 40) == -1).all()


def test_a_cache_past_two_to_the_31():
    """Keys at both ends of 2^31 + elements: offsets are 64-bit."""
    near = paged("fp8", 400, ((700, 701),))
    stride = (1 << 31) // 8
    store = torch.empty(8 * stride + near.k_cache[0].numel() * 2, dtype=torch.float8_e4m3fn, device=DEVICE)
    far = store.as_strided((9, 400, 1, 128), (stride, 128, 128, 1))
    for page in range(9):
        fill(far[page], torch.ones_like(far[page], dtype=torch.bool), float("nan"))
    pages = near.page_table[0, :2].clone()
    far[8], far[0] = near.k_cache[pages[0].long()], near.k_cache[pages[1].long()]
    table = near.page_table.clone()
    table[0, :2] = ints([8, 0])
    want, case = near.logits(), replace(near, k_cache=far, page_table=table)
    check_scores(*decode_scores(replace(case, query_len=2)), want)
    check_scores(*prefill_scores(case, "wgmma"), want)
    check_scores(*prefill_scores(case, "mma"), want)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_capture_and_replay(dtype):
    """Warmed up, captured, and replayed over other inputs in the same tensors."""
    case = paged(dtype, 392, steps((3000, 900), 2))
    host.warmup_qsa_mqa_paged_decode(
        case.k_cache,
        case.page_table,
        num_heads=4,
        head_dim=128,
        max_decode_query_len=2,
        max_num_reqs=2,
        max_num_batched_tokens=4,
    )
    decoded, prefilled = ids(case.rows).tensor, ids(case.rows).tensor
    lists = Guarded(case.rows, 2052, dtype=torch.int32)
    positions = (RATIO * case.visible + 2).long()

    def launch() -> None:
        host.qsa_select_paged_decode(case.q, case.k_cache, case.page_table, case.visible, TOKEN_TOPK, RATIO, 2, decoded)
        host.expand_qsa_block_indices(decoded, positions, case.visible, RATIO, TOKEN_TOPK, lists.tensor)
        host.qsa_select_paged_prefill(
            case.q,
            case.k_cache,
            case.page_table,
            case.query_start_loc,
            case.visible,
            TOKEN_TOPK,
            RATIO,
            2,
            prefilled,
            12000,
        )

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seed in (1, 2):
        case.q.copy_(paged(dtype, 392, steps((3000, 900), 2), seed=seed).q)
        case.visible.copy_(ints([2998, 3000 - seed, 899, 512 + seed]))
        for out in (decoded, prefilled, lists.tensor):
            out.fill_(-5)
        graph.replay()
        check_ids(decoded, case, case.logits())
        check_ids(prefilled, case, case.logits())
        assert torch.equal(lists.tensor, reference.expand_counted(decoded, positions, case.visible))
        want = select_decode(case)
        assert torch.equal(decoded, want)
    lists.check()


# Expansion.


def expansion(rows: int, top: int = TOP_BLOCKS) -> tuple[Tensor, Tensor, Tensor]:
    """Stale ids, holes, and rows short, full and long."""
    generator = seeded(rows)
    blocks = torch.randint(0, 1 << 20, (rows, top), generator=generator, device=DEVICE).int()
    blocks[torch.rand(rows, top, generator=generator, device=DEVICE) < 0.05] = -1
    positions = torch.randint(0, 1 << 22, (rows,), generator=generator, device=DEVICE)
    positions[: min(rows, 3000)] = torch.arange(min(rows, 3000), device=DEVICE) - 1
    return blocks, positions, ((positions + 1) // RATIO).int()


@pytest.mark.parametrize("rows", [1, 5, 4096])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset", [0, 1])
def test_expansion_is_exact(rows, kind, offset):
    blocks, positions, visible = expansion(rows)
    out = Guarded(rows, 2052 + offset, dtype=torch.int32)
    found = out.tensor[:, offset:]
    host.expand_qsa_block_indices(blocks, positions.to(kind), visible, RATIO, TOKEN_TOPK, found)
    out.check()
    assert torch.equal(found, reference.expand_counted(blocks, positions, visible))


def test_expansion_of_other_widths():
    blocks, positions, visible = expansion(50, 3)
    found = Guarded(50, 16, dtype=torch.int32)
    host.expand_qsa_block_indices(blocks, positions, visible, RATIO, 12, found.tensor)
    assert torch.equal(found.tensor, reference.expand_counted(blocks, positions, visible, 12))
    found.check()


# vLLM's own functions.


@needs_vllm
def test_expansion_is_vllms():
    blocks, positions, visible = expansion(300)
    ours, theirs = (Guarded(300, 2052, dtype=torch.int32) for _ in range(2))
    for module, out in ((host, ours), (vllm("indexer"), theirs)):
        module.expand_qsa_block_indices(blocks, positions, visible, RATIO, TOKEN_TOPK, out.tensor)
    assert torch.equal(ours.tensor, theirs.tensor)


def values(chosen: Tensor, logits: Tensor) -> Tensor:
    """The chosen columns' FP64 logits, descending; -1 for none."""
    found = logits.gather(1, chosen.clamp(min=0).long())
    return torch.where(chosen >= 0, found, -1).sort(1, descending=True).values


def check_against(found: Tensor, theirs: Tensor, case: Paged) -> None:
    """Our ids against a stable selection of their logits."""
    logits = case.logits(theirs.shape[1])
    seen = ~logits.isnan()
    atol = FP8_WGMMA_ATOL if case.q.dtype == torch.float8_e4m3fn else LOGIT_ATOL
    torch.testing.assert_close(theirs[seen].double(), logits[seen], rtol=LOGIT_RTOL, atol=atol)
    want = reference.select(torch.where(seen, theirs, -1.0), seen.sum(1))
    torch.testing.assert_close(values(found, logits), values(want, logits), rtol=1e-3, atol=1e-3)


@needs_vllm
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_prefill_selects_as_vllm_does(dtype):
    case = short_rows(paged(dtype, 400, (tuple(range(8000, 8100)), tuple(range(500, 580)))))
    width = -(-8100 // 64) * 64
    scratch = torch.full((case.rows * width,), torch.nan, device=DEVICE)
    tensors = (case.q, case.k_cache, case.page_table, case.query_start_loc, case.visible)
    theirs = vllm("indexer")._prefill_logits(*tensors, scratch, 100, width, 0, case.rows)
    check_against(select_prefill(case), theirs, case)


@needs_vllm
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_decode_selects_as_vllm_does(dtype, monkeypatch):
    case = short_rows(paged(dtype, 400, steps((8000, 600, 2000), 4)))
    kept = []
    module = vllm("indexer")
    monkeypatch.setattr(module, "_topk", lambda logits, *_: kept.append(logits))
    module.qsa_select_paged_decode(
        case.q, case.k_cache, case.page_table, case.visible, TOKEN_TOPK, RATIO, 4, ids(case.rows).tensor
    )
    check_against(select_decode(case), kept[0], case)
