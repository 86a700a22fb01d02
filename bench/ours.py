"""Our kernels as providers, through the runners, parameters made beforehand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import inputs as made
from bench.cases import Case
from bench.work import Work, WrongResultError
from qsa_cute.geometry import BLOCK_TOKENS, HEAD_DIM, INDEX_WIDTH, NUM_KV_HEADS, TOP_BLOCKS
from qsa_cute.reference import attention as reference
from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams, SparsePrefillRunner
from qsa_cute.runners.indexer import SCRATCH_BYTES, IndexerDecodeRunner, IndexerPrefillRunner
from qsa_cute.runners.indexer_select import Scores, ScoresDecode, Select
from qsa_cute.runners.indexer_state import QsaIndexerPoolState
from qsa_cute.runners.layer import QsaLayer, QsaLayerDecodeParams, QsaLayerPrefillParams


def poisoned(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An output that fails its check where it is not written."""
    return torch.full(shape, float("nan"), dtype=dtype or like.dtype, device=like.device)


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def prefill(case: Case, given: made.Prefill, index_kind: str = "blocks", algorithm: str | None = None) -> Work:
    """What the runner picks, with a workspace: from block ids, or from the padded lists that the peers take."""
    out = poisoned(*given.q.shape, like=given.q)
    indices = given.blocks[None] if index_kind == "blocks" else given.ids
    heads = (given.q.shape[2], given.k.shape[2], given.q.shape[3])
    layout = SparsePrefillRunner.workspace_size(
        1, case.rows, given.k.shape[1], *heads, indices.shape[2], index_kind=index_kind
    )
    memory = torch.empty(layout.size, dtype=torch.uint8, device=out.device)
    params = SparsePrefillParams.from_tensors(
        given.q,
        given.k,
        given.v,
        out,
        indices,
        given.context_lengths,
        attention_scale=made.SCALE,
        query_starts=given.query_starts,
        index_kind=index_kind,
        workspace=memory,
        algorithm=algorithm,
    )
    launch = _keeping(functools.partial(SparsePrefillRunner.run, case.dtype, params), memory, indices)
    return Work([launch], lambda _: out[0, given.checked], lambda _: given.sparse_reference)


def decode(case: Case, given: made.Decode) -> Work:
    out = poisoned(*given.q.shape, like=given.q)
    layout = SparseDecodeRunner.workspace_size(case.batch, NUM_KV_HEADS, HEAD_DIM)
    memory = torch.empty(layout.size, dtype=torch.uint8, device=given.q.device)
    workspace = {one.name: layout.tensor(memory, one.name) for one in layout.parts}
    launches = []
    for one in given.sets:
        table = given.page_table[one.sequences].contiguous()
        params = SparseDecodeParams.from_tensors(
            given.q,
            given.pool,
            table,
            one.ids,
            given.context_lengths,
            out,
            attention_scale=made.SCALE,
            max_context_len=case.ctx,
            **workspace,
        )
        launches.append(_keeping(functools.partial(SparseDecodeRunner.run, case.dtype, params), table, memory))
    return Work(launches, lambda _: out[:, 0], given.reference)


def _keeping(launch: Callable[[], object], *alive: Any) -> Callable[[], object]:
    """A launch that keeps the tensors alive whose addresses its parameters hold."""
    return functools.partial(lambda _: launch(), alive)


def scores_prefill(case: Case, given: made.Scores) -> Work:
    blocks = case.ctx // BLOCK_TOKENS
    logits = poisoned(case.rows, blocks, like=given.kbar, dtype=torch.float32)
    launch = Scores(
        logits_ptr=logits.data_ptr(),
        q_normed_ptr=given.q_normed.data_ptr(),
        kbar_ptr=given.kbar.data_ptr(),
        context_lengths=given.context_lengths.data_ptr(),
        query_starts=given.query_starts.data_ptr(),
        batch_size=1,
        seq_len=case.rows,
        num_blocks=blocks,
        fill=False,
        stream=current_stream(),
    )
    run = functools.partial(launch.run, case.dtype)
    return Work([run], lambda _: logits[given.checked], lambda _: given.reference)


def scores_decode(case: Case, given: made.ScoresDecode) -> Work:
    logits = poisoned(case.batch, given.num_blocks, like=given.pool, dtype=torch.float32)
    launches = []
    for sequences in given.sets:
        table = given.page_table[sequences].contiguous()
        launch = ScoresDecode(
            logits_ptr=logits.data_ptr(),
            q_normed_ptr=given.q_normed.data_ptr(),
            context_lengths=given.context_lengths.data_ptr(),
            pool_state=QsaIndexerPoolState.from_tensors(given.pool, table),
            batch_size=case.batch,
            max_blocks=given.num_blocks,
            stream=current_stream(),
        )
        launches.append(_keeping(functools.partial(launch.run, case.dtype), table))
    return Work(launches, lambda _: logits, given.reference)


def best_values(logits: Tensor, ids: Tensor) -> Tensor:
    """FP32 [rows, 512]: the chosen logits, descending; NaN for an id that is none."""
    valid = (ids >= 0) & (ids < logits.shape[1])
    values = logits.gather(1, torch.where(valid, ids, 0).long())
    return torch.where(valid, values, float("nan")).sort(1, descending=True).values


def topk(case: Case, given: made.TopK) -> Work:
    where, last = given.logits.device, BLOCK_TOKENS * case.columns - 1
    ids = torch.full((case.rows, TOP_BLOCKS), -1, dtype=torch.int32, device=where)
    # Row t has position last + t, so that each sees every column.
    lengths, starts = made.ints([last + case.rows], where), made.ints([last], where)
    launch = Select(
        logits_ptr=given.logits.data_ptr(),
        out_ptr=ids.data_ptr(),
        context_lengths=lengths.data_ptr(),
        query_starts=starts.data_ptr(),
        batch_size=1,
        seq_len=case.rows,
        num_blocks=case.columns,
        expand=False,
        stream=current_stream(),
    )
    run = _keeping(functools.partial(launch.run, case.dtype), lengths, starts)
    return Work([run], lambda _: best_values(given.logits, ids), lambda _: given.reference, atol=0.0, rtol=0.0)


# The layer's check holds the attention to the lists that the indexer made; the lists themselves are tests/gpu's.


def layer_prefill(case: Case, given: made.Layer, half: str | None = None) -> Work:
    """The whole of a layer's prefill, or its "indexer" or "attention" half by itself."""
    inner = given.attention
    if not isinstance(inner, made.Prefill):
        raise TypeError(f"{case.id} takes prefill inputs, got {type(inner).__name__}")
    out = poisoned(*inner.q.shape, like=inner.q)
    heads = (inner.q.shape[2], inner.k.shape[2], inner.q.shape[3], inner.k.shape[1])
    layout = QsaLayer.prefill_workspace_size(1, case.rows, case.ctx, SCRATCH_BYTES, *heads)
    memory = torch.zeros(layout.size, dtype=torch.uint8, device=out.device)
    params = QsaLayerPrefillParams.from_tensors(
        given.index_qk,
        given.cos_sin,
        given.w_q,
        given.w_k,
        inner.q,
        inner.k,
        inner.v,
        out,
        inner.context_lengths,
        memory,
        attention_scale=made.SCALE,
        kv_pool=given.pool,
        page_table=given.page_table,
        query_starts=inner.query_starts,
        max_context_len=case.ctx,
    )
    QsaLayer.prefill(case.dtype, params)  # a half finds the other's lists there
    run = {
        None: functools.partial(QsaLayer.prefill, case.dtype, params),
        "indexer": functools.partial(IndexerPrefillRunner.run, case.dtype, params.indexer),
        "attention": functools.partial(SparsePrefillRunner.run, case.dtype, params.attention),
    }[half]
    lists = layout.tensor(memory, "indices")

    def want(_: int) -> Tensor:
        _must_be_full(lists)
        return dataclasses.replace(inner, ids=lists).sparse_reference

    return Work([_keeping(run, memory)], lambda _: out[0, inner.checked], want)


def layer_decode(case: Case, given: made.Layer, half: str | None = None) -> Work:
    """As `layer_prefill`, of a decode step."""
    inner = given.attention
    if not isinstance(inner, made.Decode):
        raise TypeError(f"{case.id} takes decode inputs, got {type(inner).__name__}")
    out = poisoned(*inner.q.shape, like=inner.q)
    layout = QsaLayer.decode_workspace_size(case.batch, NUM_KV_HEADS, HEAD_DIM, case.ctx)
    memory = torch.zeros(layout.size, dtype=torch.uint8, device=out.device)
    tables, launches = [], []
    for one in inner.sets:
        tables.append(inner.page_table[one.sequences].contiguous())
        params = QsaLayerDecodeParams.from_tensors(
            given.index_qk,
            given.cos_sin,
            given.w_q,
            given.w_k,
            inner.q,
            given.pool,
            tables[-1],
            out,
            inner.context_lengths,
            memory,
            attention_scale=made.SCALE,
            max_context_len=case.ctx,
        )
        QsaLayer.decode(case.dtype, params)
        run = {
            None: functools.partial(QsaLayer.decode, case.dtype, params),
            "indexer": functools.partial(IndexerDecodeRunner.run, case.dtype, params.indexer),
            "attention": functools.partial(SparseDecodeRunner.run, case.dtype, params.attention),
        }[half]
        launches.append(_keeping(run, tables, memory))
    lists = layout.tensor(memory, "indices")

    def want(number: int) -> Tensor:
        _must_be_full(lists)
        if half == "indexer":
            return out[:, 0].float()  # it wrote none
        table = tables[number]
        found, _ = reference.sparse_decode(inner.q, given.pool, table, lists, inner.context_lengths, made.SCALE)
        return found[:, 0]

    return Work(launches, lambda _: out[:, 0], want)


def _must_be_full(lists: Tensor) -> None:
    fewest = int((lists >= 0).sum(-1).min())
    if fewest < TOP_BLOCKS * BLOCK_TOKENS:
        raise WrongResultError(
            f"the indexer's shortest list has {fewest} tokens of up to {INDEX_WIDTH}: contexts too short"
        )
