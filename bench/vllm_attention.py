"""vLLM's sparse attention: its cache, its lists and its function, and ours under the same name.

Decode takes random selections in rotation, so that the L2 is cold; prefill the rows of one sequence, whose selections
are alike as a model's are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench import inputs as made
from bench.cases import Case
from bench.work import UnavailableError, Work
from qsa_cute.geometry import BLOCK_TOKENS, HEAD_DIM, INDEX_WIDTH, TOP_BLOCKS
from qsa_cute.hosts import vllm_attention as host
from qsa_cute.reference import indexer, paged

# Tokens of a page, by tensor-parallel ranks: what the hybrid model's linear-attention state makes of it.
PAGES = {"bf16": {1: 1568, 2: 1568, 4: 784, 8: 400}, "fp8": {1: 3200, 2: 3200, 4: 1568, 8: 800}}
PREFILL_RHO = 0.995
SEQUENCES = 16  # of small batches: sets of the same sequences select other tokens
SCALES = {"bf16": {}, "fp8": {"k_scale": 0.5, "v_scale": 0.25}}


def heads(tp: int) -> tuple[int, int]:
    """(query heads, KV heads) of a rank."""
    return 24 // tp, max(1, 2 // tp)


@dataclass(frozen=True)
class Launch:
    """indices int32 [rows, 2052], block_table int32 [requests, pages], token_to_req int32 [rows]."""

    indices: Tensor
    block_table: Tensor
    token_to_req: Tensor


@dataclass(frozen=True)
class Given:
    """q, gate [rows, q_heads, 256]; k, v [pages, page, kv_heads, 256] interleaved; one launch a set."""

    q: Tensor
    gate: Tensor
    k: Tensor
    v: Tensor
    sets: list[Launch]
    checked: Tensor
    scales: dict[str, float]
    _known: dict[int, Tensor] = field(default_factory=dict)  # references, which die with the inputs

    def reference(self, number: int) -> Tensor:
        """FP32 [checked, q_heads, 256]."""
        if number not in self._known:
            one, rows = self.sets[number], self.checked
            self._known[number] = paged.sparse_paged_attention(
                self.q[rows],
                self.k,
                self.v,
                one.indices[rows],
                one.block_table,
                one.token_to_req[rows],
                gate=self.gate[rows],
                **self.scales,
            )
        return self._known[number]


def _counted(ids: Tensor) -> Tensor:
    return torch.cat([ids, (ids >= 0).sum(1, keepdim=True)], 1).int()


def given(case: Case) -> Given:
    where = made.device()
    random = made.generator(where)
    q_heads, kv_heads = heads(case.tp)
    kind, page = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[case.dtype], PAGES[case.dtype][case.tp]
    count, rows = -(-case.ctx // page), case.rows or case.batch
    if case.rows:
        sets, sequences = 1, 1
    else:
        sets, sequences = made.rotations(case.batch, case.bytes // case.batch)
        sequences = max(case.batch, min(sequences, SEQUENCES))
    cache = torch.empty(sequences * count, kv_heads, page, 2 * HEAD_DIM, dtype=kind, device=where)
    for piece in cache.view(-1).split(1 << 28):
        piece.copy_(torch.randn(piece.shape, generator=random, device=where))
    table = torch.randperm(sequences * count, generator=random, device=where).int().view(sequences, count)
    launches = []
    for number in range(sets):
        if case.rows:
            first = case.ctx - rows
            blocks = made.correlated_blocks(first, rows, PREFILL_RHO, random)
            positions = torch.arange(first, case.ctx, device=where)
            requests = torch.zeros(rows, dtype=torch.int32, device=where)
            chosen = table
        else:
            scores = torch.rand(rows, case.ctx // BLOCK_TOKENS - 1, generator=random, device=where)
            blocks = scores.topk(min(TOP_BLOCKS, scores.shape[1])).indices
            positions = torch.full((rows,), case.ctx - 2, device=where)
            requests = torch.arange(rows, dtype=torch.int32, device=where)
            chosen = table[(number * rows + torch.arange(rows, device=where)) % sequences].contiguous()
        ids = indexer.expand(blocks, positions)
        assert ids.shape[1] == INDEX_WIDTH
        launches.append(Launch(_counted(ids), chosen, requests))
    shape = (rows, q_heads, HEAD_DIM)
    return Given(
        q=made.normal(shape, torch.bfloat16, random),
        gate=made.normal(shape, torch.bfloat16, random),
        k=cache[..., :HEAD_DIM].transpose(1, 2),
        v=cache[..., HEAD_DIM:].transpose(1, 2),
        sets=launches,
        checked=torch.linspace(0, rows - 1, min(made.CHECKED_ROWS, rows)).long().to(where),
        scales=SCALES[case.dtype],
    )


def _work(attend: Callable[..., Any], case: Case, inputs: Given) -> Work:
    out = torch.full_like(inputs.q, torch.nan)
    gate = inputs.gate.view(len(out), -1)

    def launch(one: Launch) -> None:
        lists = (one.indices, one.block_table, one.token_to_req, bool(case.rows), out)
        attend(inputs.q, inputs.k, inputs.v, *lists, output_gate=gate, **inputs.scales)

    launches = [functools.partial(launch, one) for one in inputs.sets]
    return Work(launches, lambda _: out[inputs.checked], inputs.reference)


def ours(case: Case, inputs: Given) -> Work:
    return _work(host.qsa_sparse_paged_attention, case, inputs)


def vllm(case: Case, inputs: Given) -> Work:
    from bench.peers import vllm_module

    if case.dtype not in SCALES:
        raise UnavailableError(f"vLLM's cache is bf16 or fp8, not {case.dtype}")
    return _work(vllm_module("attention").qsa_sparse_paged_attention, case, inputs)
