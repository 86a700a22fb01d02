"""The soak on the CPU, with the reference in the kernel's place: what is right passes, what is wrong is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qsa_cute.reference import attention, indexer

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import attention_cases
import paged_select_cases
import soak_cases
from soak_cases import DecodeSoak, SelectSoak


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    for name, value in {
        "SLOTS": 6,
        "FLAT_PAGES": 12,
        "MAX_PAGES": 4,
        "Q_HEADS": 8,
        "HEAD_DIM": 64,
        "POOL_HEAD_DIM": 96,
    }.items():
        monkeypatch.setattr(soak_cases, name, value)


def decode(case: DecodeSoak) -> Callable[[int], None]:
    def launch(slot: int) -> None:
        inputs = (case.q[slot], case.pool, case.table[slot], case.ids[slot], case.lengths[slot])
        o, lse = attention.sparse_decode(*inputs, case.scale)
        case.o.tensor[slot] = o.to(case.q.dtype)
        case.lse.tensor[slot] = lse

    return launch


def select(case: SelectSoak) -> Callable[[int], None]:
    def launch(slot: int) -> None:
        found = indexer.select(case.logits[slot], case.seen()[slot])
        case.out.tensor[slot] = torch.where(found < 0, case.blocks, found).sort(-1).values.int()
        case.out.tensor[slot].masked_fill_(case.out.tensor[slot] == case.blocks, -1)

    return launch


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def a_decode(request) -> DecodeSoak:
    return DecodeSoak("cpu", 3, 2, 150, request.param)


@pytest.fixture
def a_selection() -> SelectSoak:
    return SelectSoak("cpu", 8, 700)


def test_right_decode_breaks_nothing(a_decode) -> None:
    for sample in (False, True, True):
        a_decode.group(decode(a_decode), sample)
    assert a_decode.broken() == {}
    count = a_decode.valid()
    assert (count == 0).any()
    assert (count > 0).sum() > 10, "rows with and without a valid entry"


def test_right_selection_breaks_nothing(a_selection) -> None:
    for sample in (False, True, True):
        a_selection.group(select(a_selection), sample)
    assert a_selection.broken() == {}
    assert (a_selection.seen() > 512).sum() > 10
    assert (a_selection.seen() == 0).any()


def test_the_count_of_valid_entries(a_decode) -> None:
    """Against the reference: one that counts nothing gives -inf."""
    a_decode.regenerate()
    a_decode.run(decode(a_decode))
    assert torch.equal(a_decode.valid() == 0, a_decode.lse.tensor[..., 0] == -torch.inf)


def late(case: DecodeSoak | SelectSoak) -> int:
    """A flat index of a row of slot 0 that has something: its output may be spoilt."""
    rows = case.valid()[0].flatten() if isinstance(case, DecodeSoak) else (case.seen()[0] > 520).long()
    return int(rows.argmax())


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (lambda case, row: row.fill_(torch.nan), {"finite"}),
        (lambda case, row: row.mul_(0), {"weights sum to one"}),
        (lambda case, row: row[0, 3:4].fill_(9), {"within the values' range"}),
        (lambda case, row: case.lse.tensor[0].fill_(1e4), {"LSE between what count and norms allow"}),
        (lambda case, row: case.o._bytes[:3].fill_(0), {"guard bands"}),
        (lambda case, row: case.lse._bytes[-1:].fill_(0), {"guard bands"}),
    ],
)
def test_wrong_decode_is_seen(a_decode, spoil, names) -> None:
    a_decode.regenerate()
    a_decode.run(decode(a_decode))
    spoil(a_decode, a_decode.o.tensor[0].flatten(0, 1)[late(a_decode)])
    a_decode.check()
    assert names <= set(a_decode.broken())


def test_a_value_for_nothing_is_seen(a_decode) -> None:
    a_decode.regenerate()
    a_decode.ids[0, 0, 0] = -1
    a_decode.run(decode(a_decode))
    a_decode.o.tensor[0, 0, 0, 5, 7] = 1e-3
    a_decode.check()
    assert a_decode.broken() == {"rows without a valid entry are zeros and -inf": 1}


def test_a_small_error_is_seen_by_the_reference(a_decode) -> None:
    a_decode.regenerate()
    a_decode.run(decode(a_decode))
    a_decode.o.tensor[2, 0, 0, 0, 5] += 0.1
    a_decode.lse.tensor[2][a_decode.lse.tensor[2] != -torch.inf] += 0.1
    a_decode.compare(2)
    assert set(a_decode.broken()) == {"the reference", "the reference's LSE"}


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda row: row.fill_(-1), "as many ids as the row has"),
        (lambda row: row[3:5].copy_(row[3:5].flip(0)), "ids ascend among those seen"),
        (lambda row: row[-1:].fill_(2**31 - 1), "ids ascend among those seen"),
        (lambda row: row[7:8].copy_(row[6:7]), "ids ascend among those seen"),
    ],
)
def test_wrong_selections_are_seen(a_selection, spoil, name) -> None:
    a_selection.regenerate()
    a_selection.run(select(a_selection))
    spoil(a_selection.out.tensor[0, late(a_selection)])
    a_selection.check()
    assert name in a_selection.broken()


def test_a_worse_block_and_a_later_tie_are_seen(a_selection) -> None:
    a_selection.regenerate()
    a_selection.lengths[0, 0] = a_selection.lengths[0, 1] = 4 * 700
    a_selection.logits[0, 0] = torch.arange(700.0)
    a_selection.logits[0, 1] = 1.0
    a_selection.run(select(a_selection))
    assert a_selection.out.tensor[0, 0, 0] == 700 - 512
    a_selection.check()
    assert a_selection.broken() == {}
    a_selection.out.tensor[0, 0, 0] = 3  # worse than what is left out
    a_selection.out.tensor[0, 1, -1] = 699  # equal to 511, which is left out
    a_selection.check()
    assert a_selection.broken() == {"nothing better is left out": 1, "ties go to the lowest ids": 1}
    a_selection.compare(0)
    assert a_selection.broken()["the reference"] > 0


def test_an_unsteady_kernel_is_seen(a_selection) -> None:
    whole, calls = select(a_selection), []

    def unsteady(slot: int) -> None:
        whole(slot)
        calls.append(slot)
        if len(calls) > soak_cases.SLOTS:
            a_selection.out.tensor[slot, 0, 0] += 1

    a_selection.group(unsteady, sample=True)
    assert set(a_selection.broken()) == {"the same bits again"}


@pytest.fixture
def on_the_cpu(monkeypatch) -> None:
    for module in (attention_cases, paged_select_cases):
        monkeypatch.setattr(module, "DEVICE", "cpu")


def test_what_is_strewn_is_out_of_range(on_the_cpu) -> None:
    values = torch.arange(20_000, dtype=torch.int32)
    found = attention_cases.strewn(values, 777_777, torch.Generator().manual_seed(0), share=0.2)
    changed = found != values
    assert 0.17 < changed.float().mean() < 0.23
    assert set(found[changed].tolist()) == {-(2**31), -1, 777_777, 2**31 - 1}


def test_a_selection_out_of_range_has_an_answer(on_the_cpu) -> None:
    """Whatever its rows see is a number: the reference's logits are NaN where they see nothing only."""
    case = paged_select_cases.paged("bf16", 64, ((300, 200, 100),) * 20, broken=True)
    bad = paged_select_cases.out_of_range(case, 0)
    assert set(bad.page_table.flatten().tolist()) >= {-(2**31), -1, len(case.k_cache), 2**31 - 1}
    assert set(bad.visible.tolist()) >= {-(2**31), -1, case.columns + 1, 2**31 - 1}
    seen = bad.visible.clamp(0, case.columns)
    assert torch.equal((~bad.logits().isnan()).sum(1), seen.long())
