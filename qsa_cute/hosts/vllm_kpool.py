"""vLLM's kpool functions, by its names and arguments, on prebuilt kernels.

A drop-in for the module that vLLM's GLM-5.3-Flash indexer imports: same arguments, same outputs, FP32 arithmetic in the
same order. Differences: indices may be int32 or int64; what lies outside a cache is left alone; a wrong argument raises
`ArgumentError` before any launch; NaN stays NaN in e4m3. Everything runs on torch's current stream and is safe under
CUDA graph capture once `KpoolRunner.preflight` was called. docs/integrating-vllm-kpool.md has the details.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks
from qsa_cute.runners.checks import show
from qsa_cute.runners.kpool import CompressWrite, DecodeUpdate, HadamardQuant, SeedTail
from qsa_cute.runners.kpool_expand import ExpandTail
from qsa_cute.runners.kpool_scores import TOP, WIDTH, PoolSelectParams, PoolSelectRunner

if TYPE_CHECKING:
    from torch import Tensor

INDEX_HEAD_DIM = geometry.INDEX_HEAD_DIM

__all__ = [
    "INDEX_HEAD_DIM",
    "append_tail_to_topk",
    "expand_pools_and_append_tail",
    "expand_pools_to_tokens",
    "fwht128_quant_fp8",
    "history_group_budget_for_topk",
    "kpool_compress_and_write_cache",
    "kpool_decode_update_and_maybe_write_cache_batched",
    "kpool_seed_tail_cache",
    "kpool_select",
]


def fwht128_quant_fp8(q: Tensor) -> tuple[Tensor, Tensor]:
    """Hadamard-128 / sqrt(128) of each row, then e4m3 with a power-of-two scale.

    Args:
        q: bf16 [rows, 128], contiguous: a head's vector a row.

    Returns: float8_e4m3fn [rows, 128] and FP32 [rows, 1].

    Raises:
        ArgumentError: rank, shape, type, device, stride or alignment does not fit.
    """
    _must(q.ndim == 2, "q", q, "two dimensions, [rows, 128]")
    out = _empty(q, tuple(q.shape), "float8_e4m3fn")
    scale = _empty(q, (q.shape[0], 1), "float32")
    HadamardQuant.from_tensors(q, out, scale).run()
    return out, scale


def kpool_compress_and_write_cache(
    kv_cache: Tensor,
    slot_k: Tensor,
    slot_score: Tensor,
    ape: Tensor,
    loc: Tensor,
    pool_size: int,
    head_dim: int = INDEX_HEAD_DIM,
    write_mask: Tensor | None = None,
    round_scale: bool = True,
    return_compressed: bool = False,
    write_cache: bool = True,
) -> tuple[Tensor, Tensor] | None:
    """Compress pools of `pool_size` tokens into one e4m3 key each, and write them to the cache's slots `loc`.

    Args:
        kv_cache: uint8 [pages, page_size, 132], pages any multiple of 4 bytes apart.
        slot_k: bf16 [pools, pool_size, 128]. slot_score: gate scores, bf16 or FP32 of that shape.
        ape: FP32 [pool_size, 128]. loc: int64 or int32 [pools]; slots outside the cache are not written.
        pool_size: 2, 4 or 8. head_dim: 128.
        write_mask: bool [pools]; pools that are False are neither read nor written.
        round_scale: scales are powers of two.
        return_compressed, write_cache: what to do; one at least. A write_mask excludes return_compressed.

    Returns: with return_compressed, float8_e4m3fn [pools, 128] and FP32 [pools]; else None.

    Raises:
        ArgumentError: as `fwht128_quant_fp8`, or the arguments contradict each other.
    """
    _head_dim(head_dim)
    if not write_cache and not return_compressed:
        raise ArgumentError("write_cache and return_compressed are both False; a compressed pool goes somewhere")
    if write_mask is not None and return_compressed:
        raise ArgumentError("write_mask is given with return_compressed; masked pools have no compressed key")
    _must(slot_k.ndim == 3 and slot_k.shape[1] == pool_size, "slot_k", slot_k, f"[pools, {pool_size}, {head_dim}]")
    key = scale = None
    if return_compressed:
        key = _empty(slot_k, (slot_k.shape[0], head_dim), "float8_e4m3fn")
        scale = _empty(slot_k, (slot_k.shape[0],), "float32")
    # Copies are held until the launch: memory that is given back before it may be another's by then.
    held = (_rows(slot_k), _rows(slot_score), ape.contiguous(), loc.contiguous())
    mask = None if write_mask is None else write_mask.contiguous()
    CompressWrite.from_tensors(
        kv_cache if write_cache else None,
        *held,
        write_mask=mask,
        dense_k=key,
        dense_scale=scale,
        round_scale=round_scale,
    ).run()
    return None if key is None or scale is None else (key, scale)


def kpool_seed_tail_cache(
    tail_kv_cache: Tensor,
    key: Tensor,
    gate_score: Tensor,
    tslot: Tensor,
    kpool: int,
    head_dim: int = INDEX_HEAD_DIM,
) -> None:
    """Copy each request's last `kpool` tokens of a prefill batch to its ring in the tail cache.

    Args:
        tail_kv_cache: bf16 [blocks, 2, ring, 128], keys then gate scores; blocks and halves any multiple of 4 elements
            apart. ring at least kpool.
        key, gate_score: [tokens, 128], bf16 (gate scores of another type are cast).
        tslot: int32 or int64 [tokens], block * ring + position % ring; negative for padding.

    Raises:
        ArgumentError: as `fwht128_quant_fp8`.
    """
    _head_dim(head_dim)
    scores = gate_score if gate_score.dtype == key.dtype else gate_score.to(key.dtype)
    count = tslot.shape[0]
    held = (_rows(key, 4)[:count], _rows(scores, 4)[:count], tslot.contiguous())  # until the launch
    SeedTail.from_tensors(tail_kv_cache, *held, kpool).run()


def kpool_decode_update_and_maybe_write_cache_batched(
    kv_cache: Tensor,
    tail_kv_cache: Tensor,
    tail_slot_mapping: Tensor,
    key: Tensor,
    slot_score: Tensor,
    ape: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    pool_size: int,
    head_dim: int = INDEX_HEAD_DIM,
    round_scale: bool = True,
) -> None:
    """Stash each request's new tokens in its ring, and write the pools that they complete to the cache.

    Args:
        kv_cache: uint8 [pages, page_size, 132].
        tail_kv_cache: bf16 [blocks, 2, ring, 128], ring a multiple of the pool.
        key, slot_score: bf16 [requests, next_n, 128]. ape: FP32 [pool_size, 128].
        tail_slot_mapping, slot_mapping, positions: int32 or int64 [requests, next_n]; negative for none.
        pool_size: 2, 4 or 8. head_dim: 128. round_scale: scales are powers of two.

    Raises:
        ArgumentError: as `fwht128_quant_fp8`.
    """
    _head_dim(head_dim)
    _must(ape.ndim == 2 and ape.shape[0] == pool_size, "ape", ape, f"[{pool_size}, {head_dim}]")
    held = (  # until the launch
        tail_slot_mapping.contiguous(),
        _rows(key, 4),
        _rows(slot_score, 4),
        ape.contiguous(),
        slot_mapping.contiguous(),
        positions.contiguous(),
    )
    DecodeUpdate.from_tensors(kv_cache, tail_kv_cache, *held, round_scale=round_scale).run()


def history_group_budget_for_topk(topk: int, pool_size: int) -> int:
    """Pools to select so that they expand to `topk` tokens. Raises ArgumentError: not a multiple of the pool."""
    size, tokens = checks.whole(pool_size), checks.whole(topk)
    if size is None or size < 1 or tokens is None or tokens % size:
        raise ArgumentError(f"topk is {show(topk)}; it takes a multiple of pool_size {show(pool_size)}")
    return tokens // size


def expand_pools_to_tokens(
    group_ids: Tensor,
    group_valid: Tensor,
    topk: int,
    pool_size: int,
    page_table: Tensor | None = None,
    topk_offsets: Tensor | None = None,
) -> Tensor:
    """Tokens of the selected pools, -1 for those that are not valid; through a table or shifted, if given.

    Args:
        group_ids: int32 or int64 [rows, topk // pool_size]. group_valid: bool of that shape.
        page_table: int32 or int64 [rows, width]: a token becomes its row's entry, clamped to the width.
        topk_offsets: int32 or int64 [rows] or [rows, 1], added to tokens; not with a page table.

    Returns: int32 [rows, topk].

    Raises:
        ArgumentError: as `fwht128_quant_fp8`, or both page_table and topk_offsets are given.
    """
    groups = history_group_budget_for_topk(topk, pool_size)
    _must(group_ids.ndim == 2 and group_ids.shape[1] == groups, "group_ids", group_ids, f"[rows, {groups}]")
    out = _empty(group_ids, (group_ids.shape[0], topk), "int32")
    ExpandTail.from_tensors(
        out, group_ids, pool_size, valid=group_valid, page_table=page_table, offsets=topk_offsets
    ).run()
    return out


def append_tail_to_topk(
    topk_result: Tensor,
    seq_lens: Tensor,
    pool_lens: Tensor,
    pool_size: int,
    page_table: Tensor | None = None,
    topk_offsets: Tensor | None = None,
) -> Tensor:
    """Each row's tokens, then the pool_size - 1 columns of its open pool, -1 where it has fewer.

    Args:
        topk_result: int32 [rows, columns]. seq_lens, pool_lens: int32 or int64 [rows].
        page_table, topk_offsets: as in `expand_pools_to_tokens`, of the open pool's tokens.

    Returns: int32 [rows, columns + pool_size - 1]; topk_result itself for pools of one.

    Raises:
        ArgumentError: as `expand_pools_to_tokens`.
    """
    checks.integer("pool_size", pool_size, 1)
    if pool_size == 1:
        return topk_result
    _must(topk_result.ndim == 2, "topk_result", topk_result, "two dimensions, [rows, columns]")
    rows, columns = topk_result.shape
    out = _empty(topk_result, (rows, columns + pool_size - 1), "int32")
    ExpandTail.from_tensors(
        out,
        topk_result,
        pool_size,
        seq_lens=seq_lens,
        pool_lens=pool_lens,
        page_table=page_table,
        offsets=topk_offsets,
        copy=True,
    ).run()
    return out


def expand_pools_and_append_tail(
    pool_ids: Tensor,
    seq_lens: Tensor,
    pool_size: int,
    page_table: Tensor | None = None,
    topk_offsets: Tensor | None = None,
) -> Tensor:
    """`expand_pools_to_tokens` (pools below 0 are not valid) and `append_tail_to_topk` in one launch.

    Args:
        pool_ids: int32 or int64 [rows, groups]. seq_lens: int32 or int64 [rows].
        page_table, topk_offsets: as in `expand_pools_to_tokens`; vLLM's own function has the identity only.

    Returns: int32 [rows, groups * pool_size + pool_size - 1].

    Raises:
        ArgumentError: as `expand_pools_to_tokens`.
    """
    checks.integer("pool_size", pool_size, 1)
    _must(pool_ids.ndim == 2, "pool_ids", pool_ids, "two dimensions, [rows, groups]")
    columns = pool_ids.shape[1] * pool_size + pool_size - 1
    out = _empty(pool_ids, (pool_ids.shape[0], columns), "int32")
    ExpandTail.from_tensors(
        out, pool_ids, pool_size, seq_lens=seq_lens, page_table=page_table, offsets=topk_offsets
    ).run()
    return out


def kpool_select(
    q_fp8: Tensor,
    weights: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    row_requests: Tensor | None = None,
    next_n: int = 0,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score each row's visible pools, select the 512 best, and list their tokens with the open pool's; SM90.

    In place of fp8_mqa_logits or fp8_paged_mqa_logits, the top-k and `expand_pools_and_append_tail`; the cache is read
    where it lies. Ties go to the lower pool, so the selection is a function of the row alone.

    Args:
        q_fp8: float8_e4m3fn [rows, 32, 128], of `fwht128_quant_fp8`.
        weights: FP32 [rows, 32], the query's scale, the softmax scale and the head's weight multiplied.
        kv_cache: uint8 [pages, page_size, 132], page_size a multiple of 8, pages 16-byte aligned.
        block_table: int32 [requests, max_pages], of pool pages. seq_lens: int32 [rows], tokens a row sees with its own.
        max_seq_len: the longest of seq_lens or more, known to the host.
        row_requests: int32 [rows], the request of each prefill row, equal ones together; None: all rows are request
            0's. next_n: of a decode step, row r being request r // next_n's; 0 for prefill.
        workspace: uint8, of `PoolSelectRunner.workspace_size`; allocated when None.

    Returns: int32 [rows, 512], pools ascending, then -1; int32 [rows, 2051], tokens.

    Raises:
        ArgumentError: as `fwht128_quant_fp8`, or the block table does not reach max_seq_len.
    """
    rows = q_fp8.shape[0]
    needed = PoolSelectRunner.workspace_size(rows, max_seq_len, next_n).size
    if workspace is None and needed:
        workspace = _empty(q_fp8, (needed,), "uint8")
    pool_ids = _empty(q_fp8, (rows, TOP), "int32")
    tokens = _empty(q_fp8, (rows, WIDTH), "int32")
    given = (q_fp8, weights, kv_cache, block_table, seq_lens, pool_ids, workspace)
    more = {"row_requests": row_requests, "tokens": tokens}
    PoolSelectRunner.run(PoolSelectParams.from_tensors(*given, max_seq_len=max_seq_len, next_n=next_n, **more))
    return pool_ids, tokens


def _empty(like: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def _rows(tensor: Tensor, step: int = 8) -> Tensor:
    """The tensor where its rows lie as the kernels read them (multiples of 2 x `step` bytes), else a copy."""
    aligned = tensor.data_ptr() % (2 * step) == 0 and all(stride % step == 0 for stride in tensor.stride()[:-1])
    if tensor.ndim and tensor.stride(-1) == 1 and aligned:
        return tensor
    return tensor.contiguous() if not tensor.is_contiguous() else tensor.clone()


def _head_dim(head_dim: int) -> None:
    if head_dim != INDEX_HEAD_DIM:
        raise ArgumentError(f"head_dim is {show(head_dim)}; it takes {INDEX_HEAD_DIM}")


def _must(holds: bool, name: str, tensor: Any, takes: str) -> None:
    if not holds:
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}; it takes {takes}")
