"""Scores and selection of pools: against FP64 over the cache's own bytes, and prefill against decode."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import DEVICE, Guarded, ints, normal, seeded
from kpool_cases import Cache, bits, tokens
from torch import Tensor

from qsa_cute.geometry import KPOOL_HEADS, TOP_BLOCKS
from qsa_cute.hosts import vllm_kpool as host
from qsa_cute.reference import kpool as reference
from qsa_cute.runners.kpool_scores import PoolScores, PoolSelectParams, PoolSelectRunner

# Of sum_h |weight_h| |q_h| |key|: the tensor cores add e4m3 products in FP32 registers of fewer bits.
ERROR = 1e-3


@dataclass
class Scoring:
    q: Tensor
    weights: Tensor
    cache: Cache
    block_table: Tensor
    seq_lens: Tensor
    row_requests: Tensor
    num_pools: int

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.weights, self.cache.tensor, self.block_table, self.seq_lens

    def scores(self, rows: slice = slice(None), **changes: object) -> Tensor:
        q, weights, cache, table, lengths = self.inputs
        out = Guarded(len(q[rows]), self.num_pools + self.num_pools % 2, dtype=torch.float32)
        more = {"row_requests": self.row_requests[rows], **changes}
        given = (q[rows], weights[rows], cache, table, lengths[rows], out.tensor[:, : self.num_pools])
        PoolScores.from_tensors(*given, **more).run()
        out.check()
        return out.tensor[:, : self.num_pools]

    @property
    def reference(self) -> Tensor:
        return reference.scores(*self.inputs, self.row_requests, self.num_pools)


def scoring(
    lengths: list[list[int]], page_size: int = 64, pad: int = 0, seed: int = 0, broken: bool = False
) -> Scoring:
    """Requests whose rows see so many tokens; what no row sees of the cache is 0xFF, NaN in keys and scales."""
    generator = seeded(seed)
    flat = [length for request in lengths for length in request]
    owner = [b for b, request in enumerate(lengths) for _ in request]
    pools = [max(0, *request, 0) // 4 for request in lengths]
    need = [-(-count // page_size) for count in pools]
    wide, total = max(need) + 1, sum(need) + 3
    order = torch.randperm(total, generator=generator, device=DEVICE).int()
    table = torch.full((len(lengths), wide), -1, dtype=torch.int32, device=DEVICE)
    cache = Cache(total, page_size, pad)
    at = 0
    for b, count in enumerate(pools):
        table[b, : need[b]] = order[at : at + need[b]]
        at += need[b]
        if not count:
            continue
        place = torch.arange(count, device=DEVICE)
        slots = table[b].long()[place // page_size] * page_size + place % page_size
        key, scale = reference.quantise(normal(generator, torch.float32, count, 128))
        factor = torch.exp2(torch.randint(-3, 4, (count,), generator=generator, device=DEVICE).float())
        reference.write_cache(cache.tensor, slots, key, scale * factor)
    if broken:
        table[0, 1], table[-1, 0] = total, -(2**31)
    q, _ = host.fwht128_quant_fp8(tokens(seed, len(flat) * KPOOL_HEADS, 128))
    weights = normal(generator, torch.float32, len(flat), KPOOL_HEADS)
    weights[:, 7] = -weights[:, 6]  # heads that cancel unless ReLU comes first
    owners = ints(owner)
    return Scoring(q.view(-1, KPOOL_HEADS, 128), weights, cache, table, ints(flat), owners, max(1, max(flat) // 4))


def check(case: Scoring, found: Tensor) -> float:
    """Every visible logit within the error that e4m3 products allow, every other one not written. The largest error."""
    want = case.reference
    seen = ~want.isnan()
    assert (bits(found[~seen]) == 0xFF).all(), "what a row does not see is not written"
    worst = 0.0
    for row in range(len(want)):
        visible = seen[row].nonzero()[:, 0]
        if not len(visible):
            continue
        table, size = case.block_table[int(case.row_requests[row])].long(), case.cache.tensor.shape[1]
        page = table[visible // size]
        inside = (page >= 0) & (page < case.cache.tensor.shape[0])
        slots = torch.where(inside, page * size + visible % size, -1)
        key, scale = reference.read_cache(case.cache.tensor, slots)
        reach = case.q[row].double().norm(dim=1) @ case.weights[row].double().abs()
        bound = reach * key.double().norm(dim=1) * scale.double()
        error = (found[row, visible].double() - want[row, visible]).abs()
        assert (error <= ERROR * bound).all(), f"row {row}: {(error / bound).nan_to_num(nan=torch.inf).max().item()}"
        worst = max(worst, (error / bound.clamp(min=1e-30)).max().item())
    return worst


RAGGED = [
    [4 * 512 + i for i in range(-5, 12)],  # crosses 511, 512, 513 pools; 17 rows
    [0, 1, 3, 4, 5, 7, 8],  # a context's first tokens
    [9],
    [-3, 260, 255],  # padding, and rows in no order
    list(range(4000, 4033)),
]


@pytest.mark.parametrize(("page_size", "pad"), [(32, 0), (64, 16), (640, 4096), (8, 0)])
@pytest.mark.parametrize("broken", [False, True])
def test_prefill_scores(page_size, pad, broken):
    case = scoring(RAGGED, page_size, pad, seed=page_size, broken=broken)
    found = case.scores()
    print("error", check(case, found))
    assert torch.equal(bits(found), bits(case.scores())), "the same bits again"
    part = case.scores(slice(5, 30))
    assert torch.equal(bits(part), bits(found[5:30])), "a logit depends on its row and pool alone"


def test_prefill_scores_of_one_request_need_no_list():
    case = scoring([list(range(700, 750))])
    assert torch.equal(bits(case.scores(row_requests=None)), bits(case.scores()))


def test_an_unknown_requests_pools_count_as_zeros():
    case = scoring([[500] * 20, [300] * 3])
    whole = case.scores()
    case.row_requests[3:6], case.row_requests[10] = -1, 2
    found = case.scores()
    lost = torch.zeros(23, dtype=torch.bool, device=DEVICE)
    lost[3:6], lost[10] = True, True
    assert not found[lost][~whole[lost].isnan()].any()
    assert (bits(found[lost][whole[lost].isnan()]) == 0xFF).all()
    assert torch.equal(bits(found[~lost]), bits(whole[~lost]))


@pytest.mark.parametrize("next_n", range(1, 9))
def test_decode_scores_are_prefill_scores(next_n):
    lengths = [4100, 2047, 2048, 2052, 3, 0, 8, 131, 9000]
    case = scoring([[max(0, length - next_n + 1 + j) for j in range(next_n)] for length in lengths], 32, seed=next_n)
    prefill = case.scores()
    decode = case.scores(row_requests=None, next_n=next_n)
    check(case, decode)
    assert torch.equal(bits(prefill), bits(decode)), "prefill's logits and decode's, bit by bit"


def check_selection(case: Scoring, longest: int, next_n: int = 0, scratch: int = 1 << 30) -> None:
    """Pools and tokens are those of our own logits exactly, by the runner and by the host's function."""
    given = {"next_n": next_n} if next_n else {"row_requests": case.row_requests}
    logits = case.scores(**({"row_requests": None, **given} if next_n else {}))
    layout = PoolSelectRunner.workspace_size(len(case.q), longest, next_n, scratch)
    workspace = torch.full((layout.size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    ids, listed = Guarded(len(case.q), 512, dtype=torch.int32), Guarded(len(case.q), 2051, dtype=torch.int32)
    params = PoolSelectParams.from_tensors(
        *case.inputs, ids.tensor, workspace, max_seq_len=longest, tokens=listed.tensor, scratch_bytes=scratch, **given
    )
    PoolSelectRunner.run(params)
    ids.check()
    listed.check()
    want, lengths = reference.select(logits, case.seq_lens.clamp(min=0)), case.seq_lens.clamp(min=0)
    assert torch.equal(ids.tensor, want)
    assert torch.equal(listed.tensor, reference.expand_and_append_tail(want, lengths, 4))
    again = host.kpool_select(*case.inputs, longest, **given)
    assert torch.equal(again[0], want)
    assert torch.equal(again[1], listed.tensor)


@pytest.mark.parametrize("scratch", [1 << 30, 3 * 2252 * 4])
@pytest.mark.parametrize("next_n", [0, 1, 3])
def test_selection(next_n, scratch):
    """Of our own logits exactly, whatever the chunks; tokens in their fixed columns."""
    lengths = (2045, 2049, 9001, 0, 5, 8192)
    requests = [[length + j for j in range(next_n)] for length in lengths] if next_n else RAGGED
    case = scoring(requests, seed=3)
    equal = case.row_requests == 0
    queries = case.q.view(torch.uint8)
    queries[equal] = queries[equal][:1]  # rows alike
    case.weights[equal] = -1  # their logits are at most 0, mostly ties between negative and negative zero
    check_selection(case, int(case.seq_lens.max()), next_n, scratch)


def test_the_selection_is_the_references_outside_a_band():
    case = scoring([list(range(16000, 16016))], seed=5)
    found, _ = host.kpool_select(*case.inputs, 16016)
    want = case.reference.float()
    for row in range(16):
        seen = want[row, : int(case.seq_lens[row]) // 4]
        cut = seen.topk(TOP_BLOCKS).values[-1]
        band = 1e-3 * max(1.0, cut.abs().item(), seen.abs().max().item())
        chosen = torch.zeros_like(seen, dtype=torch.bool)
        chosen[found[row].long()] = True
        assert chosen[seen > cut + band].all()
        assert not chosen[seen < cut - band].any()


def test_a_graph_of_the_selection_replays():
    case = scoring([[9000 + i for i in range(4)], [4000 + i for i in range(4)]], seed=6)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the inputs are made on another stream
    with torch.cuda.stream(stream):
        layout = PoolSelectRunner.workspace_size(8, 9003, 4)
        workspace = torch.zeros(layout.size, dtype=torch.uint8, device=DEVICE)
        ids, listed = (torch.zeros(8, width, dtype=torch.int32, device=DEVICE) for width in (512, 2051))
        params = PoolSelectParams.from_tensors(*case.inputs, ids, workspace, max_seq_len=9003, next_n=4, tokens=listed)
        PoolSelectRunner.run(params)
        want = (ids.clone(), listed.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            PoolSelectRunner.run(params)
        for _ in range(2):
            for each in (ids, listed, workspace):
                each.fill_(77)
            graph.replay()
            assert torch.equal(ids, want[0])
            assert torch.equal(listed, want[1])
    torch.cuda.synchronize()
