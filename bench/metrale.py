"""Metrale's operations: inputs, and ours as the provider. No peer has them; attention is compared with our own row
kernel over dense K and V and with vLLM's paged one, which do the same work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench import inputs as made
from bench.cases import Case
from bench.ours import current_stream, poisoned
from bench.work import Work
from qsa_cute.geometry import (
    BLOCK_TOKENS,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    INDEX_HEADS,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    RMS_EPS,
    ROPE_DIM,
    ROPE_THETA,
    TOP_BLOCKS,
)
from qsa_cute.reference import metrale as reference
from qsa_cute.runners import metrale as launches

NORM = (ROPE_DIM, ROPE_THETA, RMS_EPS)
PAGE_TOKENS = 16
COLUMNS = (INDEX_HEADS + 1) * INDEX_HEAD_DIM  # of the indexer's projection
CHECKED = 64  # vectors or columns that are compared


def _sets(case: Case, bytes_each: int) -> int:
    return max(2, min(64, -(-made.ROTATION_BYTES // bytes_each)))


def _vectors(case: Case, count: int, *shape: int) -> list[Tensor]:
    random = made.generator(made.device())
    return [made.normal(shape, made.dtype_of(case), random) for _ in range(count)]


def _weight(case: Case) -> Tensor:
    return 0.1 * _vectors(case, 1, INDEX_HEAD_DIM)[0]


def _work(
    case: Case,
    each: Sequence[launches.Launch],
    got: Callable[[], Tensor],
    want: Sequence[Tensor],
    alive: object,
    **tolerance: float,
) -> Work:
    """Launches that keep `alive` the tensors whose addresses they hold."""
    runs = [functools.partial(lambda launch, _: launch.run(case.dtype), launch, alive) for launch in each]
    return Work(runs, lambda _: got(), lambda number: want[number].float(), **tolerance)


def pool_inputs(case: Case) -> list[Tensor]:
    return _vectors(case, _sets(case, case.bytes), case.ctx, INDEX_HEAD_DIM)


def pool(case: Case, given: list[Tensor]) -> Work:
    weight, blocks = _weight(case), case.ctx // BLOCK_TOKENS
    keys = poisoned(blocks, INDEX_HEAD_DIM, like=weight)
    each = [
        launches.BlockPool(
            raw_keys=raw.data_ptr(),
            k_norm_w=weight.data_ptr(),
            block_keys=keys.data_ptr(),
            first_block=0,
            n_new=blocks,
            stream=current_stream(),
        )
        for raw in given
    ]
    want = [reference.block_pool(raw, weight, 0, BLOCK_TOKENS, *NORM)[-CHECKED:] for raw in given]
    return _work(case, each, lambda: keys[-CHECKED:], want, (given, weight, keys))


def qprep_inputs(case: Case) -> list[Tensor]:
    return _vectors(case, _sets(case, case.bytes), case.rows, COLUMNS)


def qprep(case: Case, given: list[Tensor]) -> Work:
    weight, heads = _weight(case), (INDEX_HEADS, INDEX_HEAD_DIM)
    out = poisoned(case.rows, *heads, like=weight, dtype=torch.float32)
    each = [
        launches.QueryPrep(
            q_in=qk.data_ptr(),
            q_norm_w=weight.data_ptr(),
            q_out=out.data_ptr(),
            rows=case.rows,
            first_pos=65536,
            pitch=COLUMNS,
            stream=current_stream(),
        )
        for qk in given
    ]
    queries = [qk[:, : INDEX_HEADS * INDEX_HEAD_DIM].unflatten(1, heads) for qk in given]
    want = [reference.qprep(q, weight, 65536, *NORM)[-CHECKED:] for q in queries]
    return _work(case, each, lambda: out[-CHECKED:], want, (given, weight))


def score_inputs(case: Case) -> tuple[Tensor, list[Tensor]]:
    """A query FP32 [4, 128] and sets of block keys."""
    blocks = case.ctx // BLOCK_TOKENS
    q = made.normal((INDEX_HEADS, INDEX_HEAD_DIM), torch.float32, made.generator(made.device(), seed=1))
    return q, _vectors(case, _sets(case, case.bytes), blocks, INDEX_HEAD_DIM)


def score(case: Case, given: tuple[Tensor, list[Tensor]]) -> Work:
    q, sets = given
    scores = poisoned(case.ctx // BLOCK_TOKENS, like=q)
    each = [
        launches.Score(
            q=q.data_ptr(),
            block_keys=keys.data_ptr(),
            scores=scores.data_ptr(),
            n_blocks=len(keys),
            stream=current_stream(),
        )
        for keys in sets
    ]
    want = [reference.score(q, keys[-CHECKED:]) for keys in sets]
    return _work(case, each, lambda: scores[-CHECKED:], want, given)


def rows_inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Queries FP32 [rows, 4, 128] and block keys."""
    shape = (case.rows, INDEX_HEADS, INDEX_HEAD_DIM)
    q = made.normal(shape, torch.float32, made.generator(made.device(), seed=1))
    return q, _vectors(case, 1, case.ctx // BLOCK_TOKENS, INDEX_HEAD_DIM)[0]


def score_rows(case: Case, given: tuple[Tensor, Tensor], algorithm: str = "") -> Work:
    q, keys = given
    first = case.ctx - case.rows
    scores = poisoned(case.rows, len(keys), like=q)
    kind = functools.partial(launches.ScoreRowsTc, algorithm=algorithm) if algorithm else launches.ScoreRows
    launch = kind(
        q=q.data_ptr(),
        block_keys=keys.data_ptr(),
        scores=scores.data_ptr(),
        rows=case.rows,
        n_blocks_max=len(keys),
        first_pos=first,
        score_stride=len(keys),
        stream=current_stream(),
    )
    rows = torch.linspace(0, case.rows - 1, made.CHECKED_ROWS).long().tolist()
    want = torch.cat([reference.score_rows(q[row : row + 1], keys, first + row, BLOCK_TOKENS) for row in rows])
    # What a row does not see is -inf in both: a huge number, so that a difference can be taken.
    return _work(case, [launch], lambda: scores[rows].clamp(min=-1e30), [want.clamp(min=-1e30)], given)


def gather_inputs(case: Case) -> list[tuple[Tensor, ...]]:
    """Sets of (k_cache, v_cache, block_table, sel)."""
    random, pages = made.generator(made.device()), case.ctx // PAGE_TOKENS
    shape = (pages, PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    sets = []
    for k, v in zip(*[iter(_vectors(case, 16, *shape))] * 2, strict=True):
        order = torch.randperm(case.ctx, generator=random, device=k.device)
        table = torch.randperm(pages, generator=random, device=k.device)
        sets.append((k, v, table.int(), order[: case.rows].int().sort().values))
    return sets


def gather(case: Case, given: list[tuple[Tensor, ...]]) -> Work:
    k_out, v_out = (poisoned(case.rows, NUM_KV_HEADS, HEAD_DIM, like=given[0][0]) for _ in range(2))
    each = [
        launches.Gather(
            k_cache=k.data_ptr(),
            v_cache=v.data_ptr(),
            block_table=table.data_ptr(),
            sel=sel.data_ptr(),
            k_out=k_out.data_ptr(),
            v_out=v_out.data_ptr(),
            n_sel=len(sel),
            block_size=PAGE_TOKENS,
            stream=current_stream(),
        )
        for k, v, table, sel in given
    ]
    want = [reference.gather(v, table, sel, v_out) for _, v, table, sel in given]
    return _work(case, each, lambda: v_out, want, (given, k_out), atol=0.0, rtol=0.0)


def prefill(case: Case, given: made.Prefill) -> Work:
    """The caches are the dense K and V in pages of random order."""
    random = made.generator(given.q.device, seed=3)
    pages = case.ctx // PAGE_TOKENS
    table = torch.randperm(pages, generator=random, device=given.q.device)
    caches = []
    for plane in (given.k, given.v):
        cache = torch.empty_like(plane).view(pages, PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM)
        cache[table] = plane.view_as(cache)
        caches.append(cache)
    table = table.int()
    out = poisoned(*given.q.shape, like=given.q)
    launch = launches.PrefillAttention(
        q=given.q.data_ptr(),
        k_cache=caches[0].data_ptr(),
        v_cache=caches[1].data_ptr(),
        block_table=table.data_ptr(),
        lists=given.blocks.data_ptr(),
        attn_out=out.data_ptr(),
        rows=case.rows,
        first_pos=case.ctx - case.rows,
        topk=TOP_BLOCKS,
        inv_sqrt_d=made.SCALE,
        block_size=PAGE_TOKENS,
        nq=NUM_Q_HEADS,
        nkv=NUM_KV_HEADS,
        stream=current_stream(),
    )
    run = functools.partial(lambda _: launch.run(case.dtype), (caches, table))
    return Work([run], lambda _: out[0, given.checked], lambda _: given.sparse_reference)


MAKERS = {
    "metrale_pool": pool_inputs,
    "metrale_qprep": qprep_inputs,
    "metrale_score": score_inputs,
    "metrale_score_rows": rows_inputs,
    "metrale_score_rows_tc": rows_inputs,
    "metrale_gather": gather_inputs,
    "metrale_prefill": made.prefill,
}
