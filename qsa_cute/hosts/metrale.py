"""Metrale's QSA operations under its names, on these kernels: its launchers' arguments in its order, addresses as
integers (or anything with `__index__`, as a device pointer's wrapper has).

The launchers' first two arguments, `gpu` and `kernel`, choose a device and a compiled kernel; here the loader does
that. What they carried is asked by keyword instead: `dtype`, "bf16" (Metrale's) or "fp16", the element type of keys,
queries, weights and caches, and `device`, an ordinal or -1 for the current context's. `stream` is a CUstream as an
integer, the last positional argument as there.

Each call checks its arguments and raises `ArgumentError` before anything is launched, launches nothing when there is
nothing to do, allocates nothing and does not synchronise; under graph capture call `preflight` before. What an address
must hold: `docs/integrating-metrale.md`, and the classes of `qsa_cute.runners.metrale`, which a caller with the same
arguments every time may keep and `run` in place of calling here.
"""

from __future__ import annotations

from qsa_cute.runners import metrale as launches
from qsa_cute.runners.metrale import MetraleRunner

__all__ = [
    "can_implement",
    "preflight",
    "qsa_block_pool",
    "qsa_gather",
    "qsa_prefill_attn",
    "qsa_qprep",
    "qsa_qprep_rows",
    "qsa_score",
    "qsa_score_rows",
    "qsa_score_rows_tc",
]

can_implement = MetraleRunner.can_implement
preflight = MetraleRunner.preflight


def qsa_block_pool(
    raw_keys: int,
    k_norm_w: int,
    block_keys: int,
    first_block: int,
    n_new: int,
    ratio: int,
    hd: int,
    rot: int,
    theta: float,
    eps: float,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """Keys of `n_new` newly complete blocks: mean of `ratio` raw keys, RMSNorm times 1 + w, rope at the block's first
    position. raw_keys elem [tokens, hd] from token 0, block_keys elem [blocks, hd] from block 0.

    Raises:
        ArgumentError: see `qsa_cute.runners.metrale.BlockPool`.
        UnsupportedError, CaptureError, ArtifactError, DriverError: see `errors`.
    """
    launches.BlockPool(
        raw_keys=raw_keys,
        k_norm_w=k_norm_w,
        block_keys=block_keys,
        first_block=first_block,
        n_new=n_new,
        ratio=ratio,
        hd=hd,
        rot=rot,
        theta=theta,
        eps=eps,
        stream=stream,
        device=device,
    ).run(dtype)


def qsa_qprep(
    q_in: int,
    q_norm_w: int,
    q_out: int,
    n_heads: int,
    hd: int,
    rot: int,
    pos: int,
    theta: float,
    eps: float,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """One decode query, elem [n_heads, hd], prepared: RMSNorm times 1 + w a head, rope at `pos`; FP32 [n_heads, hd].

    Raises: as `qsa_block_pool`, for `QueryPrep`.
    """
    launches.QueryPrep(
        q_in=q_in,
        q_norm_w=q_norm_w,
        q_out=q_out,
        rows=1,
        first_pos=pos,
        n_heads=n_heads,
        hd=hd,
        rot=rot,
        theta=theta,
        eps=eps,
        stream=stream,
        device=device,
    ).run(dtype)


def qsa_score(
    q: int,
    block_keys: int,
    scores: int,
    n_blocks: int,
    n_heads: int,
    hd: int,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """scores[b] = sum_h relu(q_h . k_b) / sqrt(hd), FP32 [n_blocks], of q FP32 [n_heads, hd].

    Raises: as `qsa_block_pool`, for `Score`.
    """
    launches.Score(
        q=q,
        block_keys=block_keys,
        scores=scores,
        n_blocks=n_blocks,
        n_heads=n_heads,
        hd=hd,
        stream=stream,
        device=device,
    ).run(dtype)


def qsa_gather(
    k_cache: int,
    v_cache: int,
    block_table: int,
    sel: int,
    k_out: int,
    v_out: int,
    n_sel: int,
    block_size: int,
    nkv: int,
    hd: int,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """K and V rows of the tokens sel int32 [n_sel] to contiguous elem [n_sel, nkv, hd].

    Raises: as `qsa_block_pool`, for `Gather`.
    """
    launches.Gather(
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        sel=sel,
        k_out=k_out,
        v_out=v_out,
        n_sel=n_sel,
        block_size=block_size,
        nkv=nkv,
        hd=hd,
        stream=stream,
        device=device,
    ).run(dtype)


def qsa_qprep_rows(
    qk: int,
    q_norm_w: int,
    q_out: int,
    rows: int,
    first_pos: int,
    qkw: int,
    n_heads: int,
    hd: int,
    rot: int,
    theta: float,
    eps: float,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """`qsa_qprep` of rows at positions first_pos + row; qk elem [rows, qkw], whose first columns are the query heads.

    Raises: as `qsa_block_pool`, for `QueryPrep`.
    """
    launches.QueryPrep(
        q_in=qk,
        q_norm_w=q_norm_w,
        q_out=q_out,
        rows=rows,
        first_pos=first_pos,
        pitch=qkw,
        n_heads=n_heads,
        hd=hd,
        rot=rot,
        theta=theta,
        eps=eps,
        stream=stream,
        device=device,
    ).run(dtype)


def qsa_score_rows_tc(
    q: int,
    block_keys: int,
    scores: int,
    rows: int,
    n_blocks_max: int,
    first_pos: int,
    score_stride: int,
    ratio: int,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """`qsa_score_rows` of 4 heads of 128 on the tensor cores; not its bits, but its selection.

    Raises: as `qsa_block_pool`, for `ScoreRowsTc`.
    """
    launches.ScoreRowsTc(
        q=q,
        block_keys=block_keys,
        scores=scores,
        rows=rows,
        n_blocks_max=n_blocks_max,
        first_pos=first_pos,
        score_stride=score_stride,
        ratio=ratio,
        stream=stream,
        device=device,
    ).run(dtype)


def qsa_score_rows(
    q: int,
    block_keys: int,
    scores: int,
    rows: int,
    n_blocks_max: int,
    first_pos: int,
    score_stride: int,
    ratio: int,
    n_heads: int,
    hd: int,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """`qsa_score` of rows at positions first_pos + row, FP32 [rows, score_stride]; -inf for blocks not yet complete.

    Raises: as `qsa_block_pool`, for `ScoreRows`.
    """
    launches.ScoreRows(
        q=q,
        block_keys=block_keys,
        scores=scores,
        rows=rows,
        n_blocks_max=n_blocks_max,
        first_pos=first_pos,
        score_stride=score_stride,
        ratio=ratio,
        n_heads=n_heads,
        hd=hd,
        stream=stream,
        device=device,
    ).run(dtype)


def qsa_prefill_attn(
    q: int,
    k_cache: int,
    v_cache: int,
    block_table: int,
    lists: int,
    attn_out: int,
    rows: int,
    first_pos: int,
    topk: int,
    ratio: int,
    block_size: int,
    nq: int,
    nkv: int,
    hd: int,
    inv_sqrt_d: float,
    stream: int,
    *,
    dtype: object = "bf16",
    device: int = -1,
) -> None:
    """Attention of each (row, query head) over exactly the blocks in lists int32 [rows, topk] and the incomplete tail,
    from the paged cache; overwrites attn_out elem [rows, nq, hd].

    Raises: as `qsa_block_pool`, for `PrefillAttention`.
    """
    launches.PrefillAttention(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        lists=lists,
        attn_out=attn_out,
        rows=rows,
        first_pos=first_pos,
        topk=topk,
        ratio=ratio,
        block_size=block_size,
        nq=nq,
        nkv=nkv,
        hd=hd,
        inv_sqrt_d=inv_sqrt_d,
        stream=stream,
        device=device,
    ).run(dtype)
