"""vLLM's index selection: its compressed key cache and its functions, and ours under the same names.

A decode's tables are rotated, so that the L2 is cold; a prefill is the last rows of one sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import inputs as made
from bench.cases import Case
from bench.ours import current_stream, poisoned
from bench.peers import PEERS, _load_vllm_topk, vllm_module
from bench.work import UnavailableError, Work
from qsa_cute.geometry import BLOCK_TOKENS, INDEX_HEAD_DIM, INDEX_HEADS, TOP_BLOCKS
from qsa_cute.hosts import vllm_select as host
from qsa_cute.reference import paged_select as reference
from qsa_cute.runners.paged_select import PagedScores, PagedScoresDecode

PAGES = {"bf16": 400, "fp8": 800}  # compressed keys of a page: a quarter of the hybrid model's
TOKENS = TOP_BLOCKS * BLOCK_TOKENS
KINDS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
VALUE_TOLERANCE = 4e-2  # of the chosen logits, up to some 60: fp8's sums on the tensor cores keep about 14 bits


@dataclass(frozen=True)
class Given:
    """q [rows, 4, 128], k_cache [pages, page, 1, 128], a page table a set, positions and visible blocks [rows]."""

    q: Tensor
    k_cache: Tensor
    tables: list[Tensor]
    starts: Tensor
    positions: Tensor
    visible: Tensor
    checked: Tensor

    def logits(self, number: int) -> Tensor:
        """FP64 [checked, columns] of a set; NaN where a row does not see."""
        rows, decode = self.checked, len(self.tables[0]) > 1
        requests = rows if decode else torch.zeros_like(rows)
        return reference.scores(self.q[rows], self.k_cache, self.tables[number], requests, self.visible[rows])


def given(case: Case) -> Given:
    where = made.device()
    random = made.generator(where)
    page, blocks, rows = PAGES[case.dtype], case.ctx // BLOCK_TOKENS, case.rows or case.batch
    per = -(-blocks // page)
    sets, sequences = (1, 1) if case.rows else made.rotations(case.batch, case.bytes // case.batch)
    keys = made.normal((sequences * per, page, 1, INDEX_HEAD_DIM), torch.bfloat16, random).to(KINDS[case.dtype])
    table = torch.randperm(sequences * per, generator=random, device=where).int().view(sequences, per)
    first = case.ctx - rows if case.rows else case.ctx - 1
    positions = first + torch.arange(rows, device=where) * bool(case.rows)
    chosen = [(number * rows + torch.arange(rows, device=where)) % sequences for number in range(sets)]
    return Given(
        q=made.normal((rows, INDEX_HEADS, INDEX_HEAD_DIM), torch.bfloat16, random).to(KINDS[case.dtype]),
        k_cache=keys,
        tables=[table] if case.rows else [table[each].contiguous() for each in chosen],
        starts=made.ints([0, rows], where),
        positions=positions,
        visible=((positions + 1) // BLOCK_TOKENS).int(),
        checked=torch.linspace(0, rows - 1, min(made.CHECKED_ROWS, rows)).long().to(where),
    )


def _values(chosen: Tensor, logits: Tensor) -> Tensor:
    """FP32 [rows, 512]: the chosen logits, descending; NaN for an id that is none."""
    valid = (chosen >= 0) & (chosen < logits.shape[1])
    found = logits.gather(1, torch.where(valid, chosen, 0).long())
    return torch.where(valid, found, torch.nan).sort(1, descending=True).values.float()


def _whole(module: Any, case: Case, inputs: Given) -> Work:
    """Selection and expansion; what is checked are the logits of the blocks that the lists name."""
    rows = len(inputs.q)
    ids = torch.full((rows, TOP_BLOCKS), -1, dtype=torch.int32, device=inputs.q.device)
    lists = torch.full((rows, TOKENS + BLOCK_TOKENS), -1, dtype=torch.int32, device=ids.device)

    def launch(table: Tensor) -> None:
        common = (inputs.q, inputs.k_cache, table)
        if case.rows:
            module.qsa_select_paged_prefill(
                *common, inputs.starts, inputs.visible, TOKENS, BLOCK_TOKENS, rows, ids, case.ctx
            )
        else:
            module.qsa_select_paged_decode(*common, inputs.visible, TOKENS, BLOCK_TOKENS, 1, ids)
        module.expand_qsa_block_indices(ids, inputs.positions, inputs.visible, BLOCK_TOKENS, TOKENS, lists)

    @functools.cache
    def logits(number: int) -> Tensor:
        return inputs.logits(number)

    def got(number: int) -> Tensor:
        return _values(lists[inputs.checked, :TOKENS:BLOCK_TOKENS] // BLOCK_TOKENS, logits(number))

    def want(number: int) -> Tensor:
        every = logits(number)
        best = reference.select(every.nan_to_num(nan=-1.0).float(), inputs.visible[inputs.checked])
        return _values(best, every)

    launches = [functools.partial(launch, table) for table in inputs.tables]
    return Work(launches, got, want, atol=VALUE_TOLERANCE, rtol=0.0)


def ours(case: Case, inputs: Given) -> Work:
    return _whole(host, case, inputs)


def vllm(case: Case, inputs: Given) -> Work:
    """With its compiled top-k."""
    if not (PEERS / "vllm_ops.so.xz").exists():
        raise UnavailableError(f"{PEERS} lacks vLLM's compiled operators (vllm_ops.so.xz)")
    _load_vllm_topk()
    return _whole(vllm_module("indexer"), case, inputs)


def _scores(case: Case, inputs: Given, launch: Callable[[Tensor], Tensor]) -> Work:
    """`launch` gives the logits [rows, columns or more]."""
    kept: list[Tensor] = []

    def keep(table: Tensor) -> None:
        kept[:] = [launch(table)]

    def got(number: int) -> Tensor:
        return kept[0][inputs.checked][:, : case.ctx // BLOCK_TOKENS]

    def want(number: int) -> Tensor:
        return inputs.logits(number)[:, : case.ctx // BLOCK_TOKENS].float()

    launches = [functools.partial(keep, table) for table in inputs.tables]
    return Work(launches, got, want, atol=VALUE_TOLERANCE, rtol=1e-3)


def ours_scores(case: Case, inputs: Given) -> Work:
    """The scores' launch by itself."""
    rows, table = len(inputs.q), inputs.tables[0]
    columns = table.shape[1] * inputs.k_cache.shape[1]
    logits = poisoned(rows, columns, like=inputs.positions, dtype=torch.float32)
    lengths = torch.zeros(rows, dtype=torch.int32, device=logits.device)

    def launch(table: Tensor) -> Any:
        fields = {
            "q_ptr": inputs.q.data_ptr(),
            "k_cache_ptr": inputs.k_cache.data_ptr(),
            "page_table": table.data_ptr(),
            "visible_blocks": inputs.visible.data_ptr(),
            "logits_ptr": logits.data_ptr(),
            "lengths_ptr": lengths.data_ptr(),
            "num_pages": len(inputs.k_cache),
            "page_size": inputs.k_cache.shape[1],
            "table_width": table.shape[1],
            "dtype": "fp8_e4m3" if case.dtype == "fp8" else case.dtype,
            "stream": current_stream(),
        }
        if not case.rows:
            return PagedScoresDecode(num_requests=rows, **fields)
        return PagedScores(
            query_start_loc=inputs.starts.data_ptr(), num_requests=1, total_rows=rows, max_query_len=rows, **fields
        )

    made_launches = {table.data_ptr(): launch(table) for table in inputs.tables}

    def run(table: Tensor) -> Tensor:
        made_launches[table.data_ptr()].run()
        return logits

    return _scores(case, inputs, run)


def vllm_scores(case: Case, inputs: Given) -> Work:
    """Its Triton kernels without the top-k."""
    module, rows = vllm_module("indexer"), len(inputs.q)
    ids = torch.empty(rows, TOP_BLOCKS, dtype=torch.int32, device=inputs.q.device)
    kept: list[Tensor] = []

    def decode(table: Tensor) -> Tensor:
        # Scores and top-k are one function there, which looks the top-k up by name.
        whole, module._topk = module._topk, lambda logits, *_: kept.__setitem__(slice(None), [logits])
        try:
            module.qsa_select_paged_decode(
                inputs.q, inputs.k_cache, table, inputs.visible, TOKENS, BLOCK_TOKENS, 1, ids
            )
        finally:
            module._topk = whole
        return kept[0]

    columns = inputs.tables[0].shape[1] * inputs.k_cache.shape[1]
    scratch = poisoned(rows * columns if case.rows else 0, like=inputs.positions, dtype=torch.float32)

    def prefill(table: Tensor) -> Tensor:
        tensors = (inputs.q, inputs.k_cache, table, inputs.starts, inputs.visible, scratch)
        found: Tensor = module._prefill_logits(*tensors, rows, columns, 0, rows)
        return found

    return _scores(case, inputs, prefill if case.rows else decode)
