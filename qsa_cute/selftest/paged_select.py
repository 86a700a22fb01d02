"""vLLM's selection over its compressed cache: a row that drops keys and one that keeps all, then counted lists."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Iterator
from typing import Any

from qsa_cute import geometry
from qsa_cute.runners.indexer_select import selection_choice
from qsa_cute.runners.paged_select import (
    SELECT_DTYPE,
    ExpandCounted,
    PagedScores,
    PagedScoresDecode,
    PagedSelectDecode,
    decode_choice,
    one_launch,
    select_ids,
)
from qsa_cute.selftest.memory import Case, Check, Memory, need
from qsa_cute.selftest.values import FP8, NAN_BITS, dot, element_bits, floats, wrong_ids

TOP, DIM, HEADS = geometry.TOP_BLOCKS, geometry.INDEX_HEAD_DIM, geometry.INDEX_HEADS
PAGE, TABLE = 132, (3, 0, 4, 1)  # of five pages
VISIBLE = (TOP + 5, 9)  # of two rows of one request, which need not ascend
POSITIONS = (4 * VISIBLE[0] + 1, 4 * VISIBLE[1] + 2)  # of the rows: two and three tokens of an open block
# Of logits around the 512th, within which a selection may differ: Hopper sums e4m3 products to 0.015.
BAND = {"bf16": 2e-3, "fp16": 2e-3, FP8: 3e-2}


@functools.cache
def inputs(dtype: str) -> tuple[array[int], array[int], list[list[float]]]:
    """q [rows, heads, 128], the cache with NaN in what no row sees, and what each row sees, scored."""
    rng = random.Random(11)
    q = element_bits(rng, dtype, len(VISIBLE) * HEADS * DIM)
    keys = element_bits(rng, dtype, VISIBLE[0] * DIM)
    cache = array(keys.typecode, [NAN_BITS[dtype]]) * ((max(TABLE) + 1) * PAGE * DIM)
    for column in range(VISIBLE[0]):
        at = TABLE[column // PAGE] * PAGE + column % PAGE
        cache[at * DIM : (at + 1) * DIM] = keys[column * DIM : (column + 1) * DIM]
    values = [floats(keys[i * DIM : (i + 1) * DIM], dtype) for i in range(VISIBLE[0])]
    scores = []
    for row, count in enumerate(VISIBLE):
        queries = [floats(q[i * DIM : (i + 1) * DIM], dtype) for i in range(row * HEADS, (row + 1) * HEADS)]
        scores.append([sum(max(0.0, dot(query, key)) for query in queries) for key in values[:count]])
    return q, cache, scores


def counted(ids: list[int], position: int) -> list[int]:
    """A row's counted list: its blocks' tokens, those of the open block, -1, the count."""
    tokens = [4 * block + i for block in ids for i in range(4)]
    tokens += range((position + 1) // 4 * 4, position + 1)
    return [*tokens, *[-1] * (4 * TOP + 3 - len(tokens)), len(tokens)]


def selection_case(way: str) -> Case:
    """By "prefill", "decode", or decode in "one launch"."""

    def case(memory: Memory, dtype: str) -> str:
        q, cache, scores = inputs(dtype)
        rows, columns = len(VISIBLE), len(TABLE) * PAGE
        visible = memory.put(VISIBLE)
        common: dict[str, Any] = {
            "q_ptr": memory.put(q),
            "k_cache_ptr": memory.put(cache),
            "page_table": memory.put(TABLE),
            "visible_blocks": visible,
            "num_pages": max(TABLE) + 1,
            "page_size": PAGE,
            "table_width": len(TABLE),
            "dtype": dtype,
            "num_requests": 1,
        }
        ids, lists = memory.poisoned(4 * rows * TOP), memory.poisoned(16 * rows * (TOP + 1))
        scratch: dict[str, Any] = {"logits_ptr": memory.poisoned(4 * rows * columns)}
        scratch |= {"lengths_ptr": memory.poisoned(4 * rows)}
        each: list[Any] = []
        if way == "one launch":
            each.append(PagedSelectDecode(out_ptr=ids, query_len=rows, **common))
        elif way == "decode":
            each.append(PagedScoresDecode(query_len=rows, **common, **scratch))
        else:
            starts = memory.put([7, 7 + rows])
            each.append(PagedScores(query_start_loc=starts, total_rows=rows, **common, **scratch))
        if way != "one launch":
            each.append(select_ids(each[0], rows, ids, TOP))
        positions = memory.put(POSITIONS)
        blocks = {"out_ptr": lists, "block_indices": ids, "query_positions": positions, "visible_blocks": visible}
        each.append(ExpandCounted(num_rows=rows, **blocks))

        def launch() -> None:
            for one in each:
                one.run(SELECT_DTYPE)

        outputs = (ids, "i", rows * TOP), (lists, "i", rows * 4 * (TOP + 1))
        (chosen, expanded), unsteady = memory.launched(launch, *outputs)
        for row in range(rows):
            found = list(chosen[row * TOP : (row + 1) * TOP])
            near = BAND[dtype] * max(1.0, max(scores[row]))
            wrong = wrong_ids(found, scores[row], near)
            width = 4 * (TOP + 1)
            want = counted([block for block in found if block >= 0], POSITIONS[row])
            if not wrong and list(expanded[row * width : (row + 1) * width]) != want:
                wrong = "the list is not the tokens of its ids and the open block's, and their number"
            if wrong:
                return f"row {row}: {wrong}"
        return unsteady

    return case


def checks(sm90: bool) -> Iterator[Check]:
    rows, columns = len(VISIBLE), len(TABLE) * PAGE
    scores = {
        "decode": need(PagedScoresDecode.KERNEL, DIM, baked=decode_choice(rows, 1, columns)[0]),
        "prefill": need(PagedScores.TILES["wgmma" if sm90 else "mma"][0], DIM),
    }
    select, baked, _ = selection_choice(rows, columns, sm90)
    expand = need(ExpandCounted.KERNEL, DIM, SELECT_DTYPE)
    rest = need(select, DIM, SELECT_DTYPE, baked), expand
    for way, kernel in scores.items():
        yield Check(f"paged selection {way}", selection_case(way), (kernel, *rest), tuple(BAND))
    for dtype in BAND:
        needs = need(PagedSelectDecode.KERNEL, DIM, dtype, one_launch(columns, dtype)[0]), expand
        yield Check("paged selection one launch", selection_case("one launch"), needs, (dtype,))
