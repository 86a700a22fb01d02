"""The reference of Metrale's operations against other formulations: complex rotation, loops, dense attention."""

from __future__ import annotations

import cmath
import math

import torch

from qsa_cute.reference import indexer
from qsa_cute.reference import metrale as reference

F64 = torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def turned(x: list[float], position: int, rot: int, theta: float) -> list[float]:
    """NeoX rope by complex numbers."""
    half, out = rot // 2, list(x)
    for i in range(half):
        z = complex(x[i], x[i + half]) * cmath.exp(1j * position * theta ** (-2 * i / rot))
        out[i], out[i + half] = z.real, z.imag
    return out


def normed(x: list[float], weight: list[float], eps: float) -> list[float]:
    root = math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v / root * (1 + w) for v, w in zip(x, weight, strict=True)]


def test_block_pool_by_hand():
    random = seeded(0)
    raw = torch.randn(12, 20, generator=random).bfloat16()
    weight = 0.1 * torch.randn(20, generator=random).bfloat16()
    found = reference.block_pool(raw, weight, 250_000, 3, 6, 1e4, 1e-6)
    for block in range(4):
        mean = raw[3 * block : 3 * block + 3].double().mean(0).bfloat16().tolist()
        want = turned(normed(mean, weight.tolist(), 1e-6), 3 * (250_000 + block), 6, 1e4)
        torch.testing.assert_close(found[block].double(), torch.tensor(want, dtype=F64), rtol=5e-3, atol=1e-6)


def test_qprep_by_hand():
    random = seeded(1)
    q = torch.randn(3, 2, 16, generator=random).half()
    weight = 0.1 * torch.randn(16, generator=random).half()
    found = reference.qprep(q, weight, 99, 16, 1e7, 1e-5)
    for row in range(3):
        for head in range(2):
            want = turned(normed(q[row, head].tolist(), weight.tolist(), 1e-5), 99 + row, 16, 1e7)
            torch.testing.assert_close(found[row, head].double(), torch.tensor(want, dtype=F64), rtol=1e-6, atol=1e-6)


def test_norms_agree_with_the_indexers_reference():
    random = seeded(2)
    x = torch.randn(9, 128, generator=random)
    weight = 0.1 * torch.randn(128, generator=random)
    table = indexer.rope_table(64)
    want = indexer.norm_rope(x, weight, table, torch.arange(9) * 7, 1e-6, F64)
    found = reference.norm_rope(x, weight, torch.arange(9) * 7, 64, 1e7, 1e-6)
    torch.testing.assert_close(found.float(), want, rtol=1e-5, atol=1e-5)


def test_scores_by_loops():
    random = seeded(3)
    q, keys = torch.randn(7, 3, 8, generator=random), torch.randn(5, 8, generator=random)
    keys[4] = torch.nan  # complete at position 14, which no row has
    found = reference.score_rows(q, keys, 5, 3)
    for row in range(7):
        for block in range(5):
            if block >= (5 + row + 1) // 3:
                assert found[row, block] == -math.inf
                continue
            dots = [sum(a * b for a, b in zip(q[row, h].tolist(), keys[block].tolist(), strict=True)) for h in range(3)]
            assert abs(found[row, block].item() - sum(max(0, d) for d in dots) / math.sqrt(8)) < 1e-9
    assert torch.equal(reference.score(q[0], keys[:4]), reference.score_rows(q[:1], keys[:4], 99, 3)[0])


def test_scores_agree_with_the_indexers_reference():
    random = seeded(4)
    q, keys = torch.randn(10, 4, 128, generator=random), torch.randn(8, 128, generator=random)
    lengths, starts = torch.tensor([32], dtype=torch.int32), torch.tensor([22], dtype=torch.int32)
    want = indexer.scores(q[None], keys[None], lengths, starts, F64)[0]
    found = reference.score_rows(q, keys, 22, 4)
    seen = want != indexer.MASKED
    assert torch.equal(found > -math.inf, seen)
    torch.testing.assert_close(found[seen], want[seen])


def test_gather_by_loops():
    random = seeded(5)
    cache = torch.randn(6, 4, 2, 8, generator=random)
    table, sel = torch.tensor([3, -1, 5, 0]), torch.tensor([0, 5, 15, -1, 9, 9])
    out = torch.full((6, 2, 8), 7.0)
    found = reference.gather(cache, table, sel, out)
    for slot, token in enumerate(sel.tolist()):
        page = -1 if token < 0 else int(table[token // 4])
        assert torch.equal(found[slot], out[slot] if page < 0 else cache[page, token % 4])


def test_attention_is_dense_attention_with_counts():
    """A token that is listed n times weighs n times as much: log n in its score."""
    random = seeded(6)
    rows, first, ratio, size, hd, length = 6, 10, 3, 4, 16, 16
    q = torch.randn(rows, 4, hd, generator=random)
    caches = [torch.randn(5, size, 2, hd, generator=random) for _ in range(2)]
    table = torch.tensor([2, 0, 4, 1])
    lists = torch.tensor([[0, 1, 2], [2, 2, -1], [3, 9, 0], [-7, 4, 4], [1, 5, 2**31 - 1], [-1, -1, -1]]).int()
    found = reference.prefill_attn(q, *caches, table, lists, first, ratio, 0.25)
    dense = [cache[table].flatten(0, 1)[:length] for cache in caches]
    for row in range(rows):
        position = first + row
        complete = (position + 1) // ratio
        counts = torch.zeros(length)
        counts[complete * ratio : position + 1] = 1
        for block in lists[row].tolist():
            if 0 <= block < complete:
                counts[block * ratio : (block + 1) * ratio] += 1
        for head in range(4):
            scores = 0.25 * dense[0][:, head // 2] @ q[row, head] + counts.log()
            want = torch.zeros(hd) if not counts.any() else scores.softmax(0) @ dense[1][:, head // 2]
            torch.testing.assert_close(found[row, head], want, rtol=1e-5, atol=1e-5)


def test_attention_passes_over_unmapped_pages():
    random = seeded(7)
    q = torch.randn(1, 1, 8, generator=random)
    k, v = (torch.randn(3, 4, 1, 8, generator=random) for _ in range(2))
    lists = torch.tensor([[0, 1]]).int()
    holed = reference.prefill_attn(q, k, v, torch.tensor([1, -1, 2]), lists, 8, 4, 1.0)
    k[0], v[0] = torch.nan, torch.nan
    without = reference.prefill_attn(q, k, v, torch.tensor([1, 0, 2]), torch.tensor([[0]]).int(), 8, 4, 1.0)
    torch.testing.assert_close(holed, without)
