"""kpool's reference on the CPU, against formulations that share nothing with it."""

from __future__ import annotations

import math

import pytest
import torch

from qsa_cute.reference import kpool

POOL = 4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed))


def sylvester(size: int) -> torch.Tensor:
    """H[i, j] = (-1)^popcount(i & j)."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]).double()


def e4m3_values() -> list[tuple[float, int]]:
    """(value, byte) of every finite non-negative e4m3 number, from its fields."""
    values = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        value = math.ldexp(mantissa / 8, -6) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7)
        values.append((value, byte))
    return values


def nearest_e4m3(value: float) -> int:
    """The byte nearest to a value, ties to the even one, saturated."""
    size = abs(value)
    byte = min(e4m3_values(), key=lambda each: (abs(each[0] - size), each[1] & 1))[1]
    return byte | (0x80 if math.copysign(1, value) < 0 else 0)


def test_hadamard_is_the_sylvester_matrix() -> None:
    x = normal(9, 128).bfloat16()
    want = x.double() @ sylvester(128) / math.sqrt(128)
    torch.testing.assert_close(kpool.hadamard(x).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exponent", range(-20, 30, 7))
def test_the_scale_is_exact_at_and_around_powers_of_two(exponent: int) -> None:
    edge = math.ldexp(448.0, exponent)
    around = [math.nextafter(edge, 0), edge, edge * (1 + 2**-23), edge * 1.99]
    found = kpool.power_scale(torch.tensor(around).float())
    assert found.tolist() == [math.ldexp(1.0, exponent + up) for up in (0, 0, 1, 1)]


def test_quantisation_is_the_nearest_of_all_e4m3_numbers() -> None:
    y = (normal(4, 128) * torch.tensor([1e-6, 1e-2, 1.0, 300.0])[:, None]).bfloat16().float()
    key, scale = kpool.quantise(y)
    for row in range(4):
        absmax = max(1e-4, y[row].abs().max().item())
        assert scale[row].item() == 2.0 ** math.ceil(math.log2(absmax / 448))
        want = [nearest_e4m3(value / scale[row].item()) for value in y[row].tolist()]
        assert key[row].view(torch.uint8).tolist() == want


def test_without_rounding_the_largest_value_becomes_448() -> None:
    y = normal(5, 128).bfloat16().float()
    key, scale = kpool.quantise(y, round_scale=False)
    assert (key.float().abs().amax(1) == 448).all()
    torch.testing.assert_close(scale * 448, y.abs().amax(1))


def test_nan_stays_nan_and_the_scale_is_that_of_the_rest() -> None:
    y = torch.ones(1, 128)
    y[0, 3] = torch.nan
    key, scale = kpool.quantise(y)
    assert key.float()[0].isnan().nonzero().tolist() == [[3]]
    assert scale.item() == 2.0**-8


def test_a_pool_is_a_softmax_by_hand() -> None:
    k, score, ape = normal(3, POOL, 128).bfloat16(), normal(3, POOL, 128, seed=1).bfloat16(), normal(POOL, 128, seed=2)
    found = kpool.pool_mean(k, score, ape)
    for pool, dim in ((0, 0), (1, 77), (2, 127)):
        weights = [math.exp(float(score[pool, j, dim]) + float(ape[j, dim])) for j in range(POOL)]
        mean = sum(w * float(k[pool, j, dim]) for j, w in enumerate(weights)) / sum(weights)
        assert abs(float(found[pool, dim]) - mean) <= 2**-8 * abs(mean) + 1e-6


def test_the_cache_is_keys_then_scales() -> None:
    cache = torch.zeros(3, 32, 132, dtype=torch.uint8)
    key, scale = kpool.quantise(normal(4, 128))
    loc = torch.tensor([33, -1, 96, 5])
    kpool.write_cache(cache, loc, key, scale, torch.tensor([True, True, True, False]))
    page = cache[1].flatten()
    assert torch.equal(page[128:256], key[0].view(torch.uint8))
    assert page[32 * 128 + 4 : 32 * 128 + 8].view(torch.float32).item() == scale[0].item()
    cache[1].flatten()[128:256] = 0
    assert int((cache != 0).sum()) <= 4, "a masked slot and two that do not exist are left alone"
    kpool.write_cache(cache, torch.tensor([95]), key[:1], scale[:1])
    read = kpool.read_cache(cache, torch.tensor([95, -1]))
    assert torch.equal(read[0][0].view(torch.uint8), key[0].view(torch.uint8))
    assert read[1].tolist() == [scale[0].item(), 0.0]


def test_seeding_keeps_the_last_tokens_of_each_request() -> None:
    ring, lengths = 8, [11, 2, 4, 1]
    slots, owners = [], []
    for request, length in enumerate(lengths):
        slots += [request * ring + i % ring for i in range(length)] + [-1]
        owners += [(request, i) for i in range(length)] + [(-1, -1)]
    key, score = normal(len(slots), 128).bfloat16(), normal(len(slots), 128, seed=1).bfloat16()
    tail = torch.zeros(4, 2, ring, 128, dtype=torch.bfloat16)
    kpool.seed_tail(tail, key, score, torch.tensor(slots), POOL)
    want = torch.zeros_like(tail)
    for i, (request, token) in enumerate(owners):
        if request >= 0 and token >= lengths[request] - POOL:
            want[request, 0, token % ring], want[request, 1, token % ring] = key[i], score[i]
    assert torch.equal(tail, want)


@pytest.mark.parametrize("ring", [4, 8])
@pytest.mark.parametrize("step", range(1, 9))
def test_decode_makes_the_pools_of_the_whole_context(step: int, ring: int) -> None:
    length = 29
    key, score, ape = normal(length, 128).bfloat16(), normal(length, 128, seed=1).bfloat16(), normal(POOL, 128, seed=2)
    cache, tail = torch.zeros(1, 8, 132, dtype=torch.uint8), torch.zeros(2, 2, ring, 128, dtype=torch.bfloat16)
    for begin in range(0, length, step):
        at = torch.arange(begin, min(length, begin + step))[None]
        slots = torch.where(at % POOL == POOL - 1, at // POOL, -1)
        kpool.decode_update(cache, tail, ring + at % ring, key[at], score[at], ape, slots, at)
    want = torch.zeros_like(cache)
    groups = [each[:28].view(7, POOL, 128) for each in (key, score)]
    kpool.write_cache(want, torch.arange(7), *kpool.compress(*groups, ape))
    assert torch.equal(cache, want)


def test_lists_by_hand() -> None:
    ids, lengths = torch.tensor([[2, -1], [0, 5]]), torch.tensor([10, 24])
    assert kpool.expand_and_append_tail(ids, lengths, 4).tolist() == [
        [8, 9, 10, 11, -1, -1, -1, -1, 8, 9, -1],
        [0, 1, 2, 3, 20, 21, 22, 23, -1, -1, -1],
    ]
    table = torch.arange(100, 112).expand(2, 12)
    placed = kpool.expand(ids, torch.tensor([[True, False], [True, True]]), 4, page_table=table)
    assert placed.tolist() == [[108, 109, 110, 111, -1, -1, -1, -1], [100, 101, 102, 103, 111, 111, 111, 111]]
    moved = kpool.append_tail(ids.int(), lengths, lengths // 4, 4, topk_offsets=torch.tensor([[7], [9]]))
    assert moved.tolist() == [[2, -1, 15, 16, -1], [0, 5, -1, -1, -1]]


def test_scores_and_selection_by_hand() -> None:
    cache = torch.full((40, 32, 132), 0xFF, dtype=torch.uint8)
    pools, rows = 600, 3
    key, scale = kpool.quantise(normal(pools, 128))
    table = torch.randperm(40, generator=seeded(3))[:20].int().view(1, 20)
    place = torch.arange(pools)
    kpool.write_cache(cache, table[0].long()[place // 32] * 32 + place % 32, key, scale)
    q, _ = kpool.quantise(normal(rows, 32, 128, seed=4))
    weights, lengths = normal(rows, 32, seed=5), torch.tensor([2400, 7, 2051])
    found = kpool.scores(q, weights, cache, table, lengths, torch.zeros(rows, dtype=torch.int32), pools)
    for row, pool in ((0, 0), (0, 599), (1, 0), (2, 511)):
        want = 0.0
        for head in range(32):
            dot = float(q[row, head].double() @ key[pool].double())
            want += float(weights[row, head]) * max(0.0, dot)
        assert found[row, pool].item() == pytest.approx(want * float(scale[pool]), rel=1e-9)
    assert (~found.isnan()).sum(1).tolist() == [600, 1, 512]
    chosen = kpool.select(found.float(), lengths)
    ranked = sorted(range(600), key=lambda pool: (-found[0, pool].float().item(), pool))
    assert chosen[0].tolist() == sorted(ranked[:512])
    assert chosen[1].tolist() == [0] + [-1] * 511
    assert chosen[2].tolist() == list(range(512))
