"""kpool's launches and vLLM's names for them: against the reference and vLLM's Triton kernels, in guarded memory."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE, Guarded, ints, normal, seeded
from kpool_cases import FP8, Cache, Tail, ape, bits, flat_of, tokens
from peer import THERE, vllm
from torch import Tensor

from qsa_cute.hosts import vllm_kpool as host
from qsa_cute.reference import kpool as reference
from qsa_cute.runners.kpool import CompressWrite, DecodeUpdate, HadamardQuant, SeedTail
from qsa_cute.runners.kpool_expand import ExpandTail

# Of the cache's bytes, how many may differ from the FP64 softmax's: an FP32 ulp of a pooled value now and then crosses
# a bf16 boundary, which moves some of the pool's 128 bytes by one e4m3 step.
MOST_DIFFERING = 2e-4


@pytest.fixture(scope="module", autouse=True)
def peer():
    """vLLM's module, or None; the reference is compared in any case."""
    return vllm("kpool") if THERE else None


# Hadamard.


def hadamard_rows(kind: str, rows: int) -> torch.Tensor:
    if kind == "normal":
        return tokens(rows, rows, 128)
    if kind == "tiny":
        return (normal(seeded(1), torch.float32, rows, 128) * 1e-6).bfloat16()
    if kind == "edges":  # absmax exactly 448 x 2^k, and one bf16 below and above: two values whose sum spreads evenly
        values = torch.tensor([1.75, 1.7421875, 1.7578125, 1.0, 1.9921875], device=DEVICE)
        x = torch.zeros(rows, 128, dtype=torch.bfloat16, device=DEVICE)
        row = torch.arange(rows, device=DEVICE)
        most = values[row % 5] * torch.exp2((row % 21 - 10).float())
        x[row, row * 37 % 128] = (most * 128**0.5 * 0.99).bfloat16()
        x[row, (row * 37 + 1) % 128] = (most * 128**0.5 - x[row, row * 37 % 128].float()).bfloat16()
        assert torch.equal(reference.hadamard(x).bfloat16().float().abs().amax(1), most)
        return x
    x = tokens(3, rows, 128)
    x[::3, 5], x[1::3] = torch.inf, 0
    x[2::3, 7] = torch.nan
    return x


@pytest.mark.parametrize("kind", ["normal", "tiny", "edges", "broken"])
@pytest.mark.parametrize("rows", [1, 7, 8, 33, 1000])
def test_hadamard(kind, rows, peer):
    q = hadamard_rows(kind, rows)
    out, scale = Guarded(rows, 128, dtype=FP8), Guarded(rows, 1, dtype=torch.float32)
    HadamardQuant.from_tensors(q, out.tensor, scale.tensor).run()
    out.check()
    scale.check()
    want, want_scale = reference.hadamard_quant(q)
    assert torch.equal(scale.tensor, want_scale)
    found, want = (each.float().nan_to_num(nan=1e9) for each in (out.tensor, want))
    assert torch.equal(found, want)
    if kind != "broken":
        assert torch.equal(bits(out.tensor), bits(reference.hadamard_quant(q)[0])), "the sign of zero, too"
    again = host.fwht128_quant_fp8(q)
    assert torch.equal(bits(again[0]), bits(out.tensor))
    if peer is not None and kind != "broken":
        theirs = peer.fwht128_quant_fp8(q)
        assert torch.equal(bits(theirs[0]), bits(out.tensor))
        assert torch.equal(theirs[1], scale.tensor)


def test_no_rows():
    out, scale = host.fwht128_quant_fp8(torch.empty(0, 128, dtype=torch.bfloat16, device=DEVICE))
    assert out.shape == (0, 128)
    assert scale.shape == (0, 1)


# Compression.


def locations(seed: int, pools: int, slots: int, bad: bool) -> torch.Tensor:
    generator = seeded(seed)
    loc = torch.randperm(slots, generator=generator, device=DEVICE)[:pools]
    if bad:
        outside = torch.tensor([-1, slots, -(2**31), 2**31 - 1, 2**40 + 3, -(2**40)], device=DEVICE)
        loc[::5] = outside.repeat(pools)[: len(loc[::5])]
    return loc


@pytest.mark.parametrize(
    ("pool", "page_size", "pad", "round_scale"),
    [(4, size, pad, how) for size, pad in ((32, 0), (64, 4), (640, 192)) for how in (True, False)]
    + [(2, 32, 0, True), (8, 64, 4, False)],
)
def test_compress_and_write(pool, page_size, pad, round_scale, peer):
    compress_and_write(pool, page_size, pad, round_scale, peer)


def compress_and_write(pool, page_size, pad, round_scale, peer=None, pools=300, slack=0) -> None:
    """`slack`: bytes more that may differ, where pools are so few that one of them is more than its share."""
    cache = Cache(2000 // page_size + 2, page_size, pad)
    k, score, bias = tokens(pool, pools, pool, 128), tokens(pool + 1, pools, pool, 128), ape(2, pool)
    loc, mask = locations(3, pools, cache.slots, bad=True), torch.rand(pools, generator=seeded(4), device=DEVICE) < 0.8
    want, theirs = cache.copy(), cache.copy()
    inside = (loc >= 0) & (loc < cache.slots)
    skipped = ~(mask & inside)
    k[skipped], score[skipped] = torch.nan, torch.nan
    how = {"write_mask": mask, "round_scale": round_scale}
    host.kpool_compress_and_write_cache(cache.tensor, k, score, bias, loc, pool, **how)
    cache.memory.check()
    key, scale = reference.compress(k, score, bias, round_scale)
    reference.write_cache(want, loc, key, scale, mask)
    found = cache.bytes().clone()
    off = int((found != flat_of(want)).sum())
    assert off <= slack + MOST_DIFFERING * pools * 132 + (0 if round_scale else 4 * pools), f"{off} bytes differ"
    written = ~skipped
    dense = (k[written].contiguous(), score[written].contiguous(), bias, loc[written])
    got, got_scale = host.kpool_compress_and_write_cache(
        cache.tensor, *dense, pool, round_scale=round_scale, return_compressed=True, write_cache=False
    )
    assert torch.equal(found, cache.bytes()), "write_cache=False leaves the cache alone"
    stored, stored_scale = reference.read_cache(cache.tensor, loc[written])
    assert torch.equal(bits(got), bits(stored)), "a pool's bytes depend on its tokens alone"
    assert torch.equal(got_scale, stored_scale)
    torch.testing.assert_close(got_scale, scale[written], rtol=1e-2 if round_scale is False else 0, atol=0)
    step = (got.float() - key[written].float()).abs()
    assert (step <= 0.13 * key[written].float().abs() + 2**-9).all(), "what differs does so by one step"
    if peer is not None and pool == 4:
        masked = mask & inside
        safe = torch.where(inside, loc, 0)
        peer.kpool_compress_and_write_cache(
            theirs, k, score, bias, safe, pool, write_mask=masked, round_scale=round_scale
        )
        off = int((found != flat_of(theirs)).sum())
        # Their division of the quantised value is approximate without round_scale.
        assert off <= (0 if round_scale else 1e-3 * pools * 132), f"{off} bytes differ from vLLM's"


def test_compress_takes_views_and_fp32_scores():
    pools = 37
    wide = tokens(5, pools, 4, 256)
    score, bias, loc = tokens(6, pools, 4, 128), ape(7, 4), torch.arange(pools, device=DEVICE)
    whole = (wide[..., 128:].contiguous(), score, bias, loc, 4)
    cache = Cache(3, 32)
    want = host.kpool_compress_and_write_cache(cache.tensor, *whole, return_compressed=True)
    assert want is not None
    ways = {
        "strided": (wide[..., 128:], score, bias, loc, 4),
        "fp32": (wide[..., 128:], score.float(), bias, loc, 4),
        "int32": (wide[..., 128:], score, bias, loc.int(), 4),
        "transposed": (wide[..., 128:], score.transpose(0, 1).contiguous().transpose(0, 1), bias, loc, 4),
    }
    before = cache.bytes().clone()
    for name, arguments in ways.items():
        got = host.kpool_compress_and_write_cache(cache.tensor, *arguments, return_compressed=True)
        assert got is not None
        assert torch.equal(bits(got[0]), bits(want[0])), name
        assert torch.equal(got[1], want[1]), name
        assert torch.equal(before, cache.bytes()), name
    none = [each[:0] for each in whole[:2]]
    assert host.kpool_compress_and_write_cache(cache.tensor, *none, bias, loc[:0], 4) is None


# The tail.


def seed(
    tail: Tail, parts: tuple[tuple[int, int], ...], kind: torch.dtype, pool: int = 4, padding: tuple[int, ...] = (-1,)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Requests of `parts` (first position, tokens) seeded by the host's function and checked, 0 to 2 entries of padding
    after each: (the cache before, key, score, slots)."""
    blocks, _, ring, _ = tail.tensor.shape
    slots: list[int] = []
    for request, (start, count) in enumerate(parts):
        slots += [(blocks - 1 - request) * ring + (start + i) % ring for i in range(count)]
        slots += [padding[(request + i) % len(padding)] for i in range(request % 3)]
    slots.append(blocks * ring + 1)  # past the cache
    tslot = torch.tensor(slots, device=DEVICE).to(kind)
    key, score = tokens(1, len(slots), 128), tokens(2, len(slots), 128)
    want, before = tail.copy(), tail.copy()
    host.kpool_seed_tail_cache(tail.tensor, key, score, tslot, pool)
    tail.memory.check()
    reference.seed_tail(want, key, score, tslot, pool)
    assert torch.equal(tail.memory.tensor.view(torch.int16), flat_of(want).view(torch.int16))
    return before, key, score, tslot


def test_seed_tail(peer):
    """Requests of 1 to 9 tokens, padding between them, a ring wider than the pool, a strided and padded cache."""
    parts = ((0, 9), (3, 1), (5, 2), (6, 3), (7, 4), (1, 5), (2, 8), (0, 0), (4, 7))
    for ring, kind in ((4, torch.int32), (8, torch.int64), (12, torch.int32)):
        tail = Tail(11, ring, block_elems=2 * ring * 128 + 132, half_pad=4)
        theirs, key, score, tslot = seed(tail, parts, kind)
        if peer is not None:
            peer.kpool_seed_tail_cache(theirs, key[:-1], score[:-1], tslot[:-1], 4)
            assert torch.equal(flat_of(theirs).view(torch.int16), bits(tail.memory.tensor).view(torch.int16))
    host.kpool_seed_tail_cache(tail.tensor, key, score, tslot[:0], 4)


NONE = ((-1,), (-1,), (-5,))  # positions, tail slots and slots of the cache of tokens that have none


def decode_case(next_n: int, pool: int, ring: int, seed: int, requests: int = 24, none=NONE):
    """Requests that begin at every offset of a ring; holes and padding among the indices."""
    generator = seeded(seed)
    start = torch.arange(requests, device=DEVICE)[:, None] + torch.tensor([[4096 * pool]], device=DEVICE)
    start[requests // 2 :] -= 4096 * pool  # some begin their context
    positions = start + torch.arange(next_n, device=DEVICE)
    # Block 0, which a token without a tail slot reads, is nobody's.
    block = 1 + torch.randperm(requests + 2, generator=generator, device=DEVICE)[:requests, None]
    tail_slots = block * ring + positions % ring
    slots = torch.full_like(positions, -1)
    ends = positions % pool == pool - 1
    slots[ends] = torch.randperm(64 * 9, generator=generator, device=DEVICE)[: int(ends.sum())]
    drop = torch.rand(3, requests, next_n, generator=generator, device=DEVICE) < 0.07
    drop[:, : requests // 3] = False
    for values, dropped, bad in zip((positions, tail_slots, slots), drop, none, strict=True):
        values[dropped] = torch.tensor(bad, device=DEVICE).repeat(values.numel())[: int(dropped.sum())]
    return positions.int(), tail_slots.int(), slots.int()


@pytest.mark.parametrize(
    ("next_n", "pool", "ring"),
    [(n, 4, ring) for n in range(1, 9) for ring in (4, 8)]
    + [(n, *sizes) for n in (3, 8) for sizes in ((4, 12), (2, 2), (8, 8))],
)
def test_decode_update(next_n, pool, ring, peer):
    decode_update(next_n, pool, ring, peer)


def decode_update(next_n, pool, ring, peer=None, requests=24, slack=0, none=NONE) -> None:
    """`slack`: as of `compress_and_write`."""
    positions, tail_slots, slots = decode_case(next_n, pool, ring, next_n, requests, none)
    cache, tail = Cache(10, 64, 12), Tail(requests + 3, ring, block_elems=2 * ring * 128 + 1056)
    tail.tensor.copy_(tokens(1, *tail.tensor.shape[:3], 128))
    key, score = (tokens(seed, requests, next_n, 192)[..., 64:] for seed in (2, 3))
    bias = ape(4, pool)
    copies = [(cache.copy(), tail.copy()) for _ in range(3)]
    rest = (tail_slots, key, score, bias, slots, positions)
    host.kpool_decode_update_and_maybe_write_cache_batched(cache.tensor, tail.tensor, *rest, pool)
    cache.memory.check()
    tail.memory.check()
    reference.decode_update(*copies[0], *rest)
    assert torch.equal(bits(tail.memory.tensor), flat_of(copies[0][1])), "the tail is copied bit by bit"
    off = int((cache.bytes() != flat_of(copies[0][0])).sum())
    assert off <= slack + MOST_DIFFERING * requests * next_n / pool * 132 + 1, f"{off} bytes differ"
    wide = (tail_slots.long(), key, score, bias, slots.long(), positions.long())
    host.kpool_decode_update_and_maybe_write_cache_batched(*copies[1], *wide, pool)
    assert torch.equal(flat_of(copies[1][0]), cache.bytes()), "int64 indices, the same bits"
    assert torch.equal(flat_of(copies[1][1]), bits(tail.memory.tensor))
    if peer is not None:
        peer.kpool_decode_update_and_maybe_write_cache_batched(*copies[2], *rest, pool)
        assert torch.equal(flat_of(copies[2][0]), cache.bytes()), "vLLM's bytes"
        assert torch.equal(flat_of(copies[2][1]), bits(tail.memory.tensor))


def test_decode_writes_what_prefill_writes():
    """A context of 43 tokens, in one prefill, or by decode steps of 1 to 8 after a seeded prefill: the same cache."""
    length, prompt = 43, 6
    key, score, bias = tokens(1, length, 128), tokens(2, length, 128), ape(3, 4)
    pools = length // 4
    whole, stepped, tail = Cache(1, 32), Cache(1, 32), Tail(3, 8)
    loc = torch.arange(pools, device=DEVICE)
    groups = [each[: pools * 4].view(pools, 4, 128) for each in (key, score)]
    host.kpool_compress_and_write_cache(whole.tensor, *groups, bias, loc, 4)
    begin = prompt // 4
    host.kpool_compress_and_write_cache(stepped.tensor, *(each[:begin] for each in groups), bias, loc[:begin], 4)
    slot = 2 * 8 + torch.arange(length, device=DEVICE) % 8
    host.kpool_seed_tail_cache(tail.tensor, key[:prompt], score[:prompt], slot[:prompt].int(), 4)
    at, step = prompt, 1
    while at < length:
        end = min(length, at + step)
        where = torch.arange(at, end, device=DEVICE)
        slots = torch.where(where % 4 == 3, where // 4, -1)
        host.kpool_decode_update_and_maybe_write_cache_batched(
            stepped.tensor, tail.tensor, slot[None, at:end], key[None, at:end], score[None, at:end], bias, slots[None],
            where[None], 4,
        )  # fmt: skip
        at, step = end, step % 8 + 1
    assert torch.equal(whole.bytes(), stepped.bytes())


def test_bad_indices_touch_nothing():
    cache, tail = Cache(2, 32), Tail(2, 4)
    tail.tensor.copy_(tokens(1, 2, 2, 4, 128))
    before = (cache.bytes().clone(), bits(tail.memory.tensor).clone())
    big = torch.tensor([[64, 2**31 - 1, -(2**31), 2**40]], device=DEVICE)
    key = tokens(2, 1, 4, 128)
    at = torch.full_like(big, 7)
    update = host.kpool_decode_update_and_maybe_write_cache_batched
    update(cache.tensor, tail.tensor, torch.full_like(big, 8), key, key, ape(1, 4), big, at, 4)  # block 2 is none
    update(cache.tensor, tail.tensor, torch.full_like(big, -1), key, key, ape(1, 4), big, at, 4)
    update(cache.tensor, tail.tensor, torch.full_like(big, 4), key, key, ape(1, 4), torch.full_like(big, 3), -at, 4)
    update(cache.tensor, tail.tensor, *(each[:, :0] for each in (big, key, key)), ape(1, 4), big[:, :0], at[:, :0], 4)
    assert torch.equal(before[0], cache.bytes())
    assert torch.equal(before[1], bits(tail.memory.tensor))


# Expansion.


def pool_lists(rows: int, groups: int, kind: torch.dtype) -> torch.Tensor:
    ids = torch.randint(0, 30000, (rows, groups), generator=seeded(rows), device=DEVICE)
    ids[torch.rand(rows, groups, generator=seeded(1), device=DEVICE) < 0.2] = -1
    return ids.to(kind)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("rows", "groups", "pool"),
    [(1, 512, 4), (9, 512, 4), (5, 511, 4), (6, 513, 4), (4, 33, 2), (3, 17, 8), (3, 7, 3), (2, 5, 1)],
)
def test_expand_and_append_tail(rows, groups, pool, kind, peer):
    ids, lengths = pool_lists(rows, groups, kind), ints([4 * 511 + i for i in range(rows - 1)] + [-1 - rows])
    wide = torch.empty(rows, groups + 3, dtype=kind, device=DEVICE)[:, 3:]
    wide.copy_(ids)
    columns = groups * pool + pool - 1
    want = reference.expand_and_append_tail(ids, lengths, pool)
    out = Guarded(rows, columns, dtype=torch.int32)
    ExpandTail.from_tensors(out.tensor, wide, pool, seq_lens=lengths).run()
    out.check()
    assert torch.equal(out.tensor, want)
    assert torch.equal(host.expand_pools_and_append_tail(ids, lengths.long(), pool), want)
    if peer is not None:
        assert torch.equal(peer.expand_pools_and_append_tail(ids, lengths, pool), want)


@pytest.mark.parametrize("pool", [1, 2, 4, 8, 3])
@pytest.mark.parametrize("way", ["identity", "table", "offsets"])
def test_expand_and_append_through_a_table_or_offsets(pool, way, peer):
    rows, groups, width = 7, 21, 300
    ids = torch.randint(-2, 110, (rows, groups), generator=seeded(pool), device=DEVICE).int()
    valid = torch.rand(rows, groups, generator=seeded(2), device=DEVICE) < 0.7
    lengths = ints([0, 1, 3, 4 * 9 + 1, 131, 299, 310])
    counts = lengths // pool
    table = torch.randint(0, 10**6, (rows, width), generator=seeded(3), device=DEVICE)
    offsets = torch.randint(0, 10**6, (rows,), generator=seeded(4), device=DEVICE)
    more = {"identity": {}, "table": {"page_table": table}, "offsets": {"topk_offsets": offsets}}[way]
    narrow = {name: tensor.int() for name, tensor in more.items()}
    want = reference.expand(ids, valid, pool, **more)
    for given in (more, narrow):
        assert torch.equal(host.expand_pools_to_tokens(ids, valid, groups * pool, pool, **given), want)
    both = reference.append_tail(want, lengths, counts, pool, **more)
    found = host.append_tail_to_topk(want, lengths, counts, pool, **narrow)
    assert torch.equal(found, both)
    kept = reference.append_tail(reference.expand(ids, ids >= 0, pool, **more), lengths, counts, pool, **more)
    assert torch.equal(host.expand_pools_and_append_tail(ids, lengths, pool, **more), kept)
    if peer is not None:
        assert torch.equal(peer.expand_pools_to_tokens(ids, valid, groups * pool, pool, **more), want)
        assert torch.equal(peer.append_tail_to_topk(want, lengths, counts, pool, **more), both)


def test_append_keeps_each_rows_own_history():
    topk = torch.arange(5 * 8, device=DEVICE).int().view(5, 8) - 3
    found = host.append_tail_to_topk(topk, ints([9, 10, 11, 12, 3]), ints([2, 2, 2, 3, 0]), 4)
    assert torch.equal(found[:, :8], topk)
    assert found[:, 8:].tolist() == [[8, -1, -1], [8, 9, -1], [8, 9, 10], [-1, -1, -1], [0, 1, 2]]


# Repeats and graphs.


def test_every_launch_repeats_bit_by_bit_and_replays_in_a_graph():
    pools, requests = 513, 33
    k, score, bias = tokens(1, pools, 4, 128), tokens(2, pools, 4, 128), ape(3, 4)
    q, loc = tokens(4, 999, 128), torch.arange(pools, device=DEVICE)
    positions, tail_slots, slots = decode_case(4, 4, 8, 9, requests)
    cache, tail = Cache(20, 64), Tail(requests + 3, 8)
    out, scale = Guarded(999, 128, dtype=FP8), Guarded(999, 1, dtype=torch.float32)
    ids, tokens_out = pool_lists(requests, 512, torch.int32), Guarded(requests, 2051, dtype=torch.int32)
    key, gate = tokens(5, requests, 4, 128), tokens(6, requests, 4, 128)
    first_slots, lengths = tail_slots[:, 0].contiguous(), positions[:, 0].contiguous()  # a launch keeps addresses only
    stream = torch.cuda.Stream()
    outputs = (out, scale, cache.memory, tail.memory, tokens_out)
    torch.cuda.synchronize()  # the inputs are made on another stream
    with torch.cuda.stream(stream):
        made = [
            HadamardQuant.from_tensors(q, out.tensor, scale.tensor),
            CompressWrite.from_tensors(cache.tensor, k, score, bias, loc),
            SeedTail.from_tensors(tail.tensor, key[:, 0], gate[:, 0], first_slots, 4),
            DecodeUpdate.from_tensors(cache.tensor, tail.tensor, tail_slots, key, gate, bias, slots, positions),
            ExpandTail.from_tensors(tokens_out.tensor, ids, 4, seq_lens=lengths),
        ]

        def once() -> list[torch.Tensor]:
            for launch in made:
                launch.run()
            return [bits(each.tensor).clone() for each in outputs]

        def poison() -> None:
            for each in outputs:
                each.tensor.view(torch.uint8).fill_(0xFF)
            tail.tensor.copy_(tokens(7, *tail.tensor.shape[:3], 128))

        poison()
        first = once()
        poison()
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in made:
                launch.run()
        for _ in range(2):
            poison()
            graph.replay()
            assert all(torch.equal(a, bits(b.tensor)) for a, b in zip(first, outputs, strict=True))
    torch.cuda.synchronize()
    for each in outputs:
        each.check()
