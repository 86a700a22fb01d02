"""The peers: vLLM's and SGLang's published Triton kernels (from .peers/), torch with cuDNN, FlashAttention-4.

Each gets the layout that its own engine has, and whatever can be prepared beforehand is prepared.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import inputs as made
from bench.cases import Case
from bench.fetch_peers import PEERS
from bench.ours import best_values, poisoned
from bench.work import UnavailableError, Work
from qsa_cute.geometry import (
    BLOCK_TOKENS,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    TOP_BLOCKS,
)

VLLM_PAGE = 1600  # tokens of a page of the hybrid model, whose linear-attention state fixes it
VLLM_KEY_PAGE = VLLM_PAGE // BLOCK_TOKENS
GATE = 50.0  # of vLLM's fused output gate: its sigmoid is 1 in bf16
# (BLOCK_N, warps, stages) that SGLang's chunked prefill is tried with; its own table has no H200.
SGLANG_CONFIGS = ((16, 1, 2), (32, 1, 2), (32, 2, 2), (64, 4, 2))


@functools.cache
def _peers() -> Any:
    if not (PEERS / "peers.py").exists():
        raise UnavailableError(f"{PEERS} has no peers.py; run: python -m bench.fetch_peers")
    if str(PEERS) not in sys.path:
        sys.path.insert(0, str(PEERS))
    return importlib.import_module("peers")


@functools.cache
def vllm_module(module: str) -> Any:
    """vLLM's `attention`, `indexer` or `kpool` kernels. Raises UnavailableError."""
    found = getattr(_peers().vllm(), module)
    if found is None:
        raise UnavailableError(f"{PEERS} lacks vLLM's {module} kernels")
    return found


def _bf16_only(case: Case, peer: str) -> None:
    if case.dtype != "bf16":
        raise UnavailableError(f"{peer}'s kernels take bf16 only")


# vLLM, attention.


def _interleaved(pages: int, like: Tensor) -> Tensor:
    """Its cache: [pages, kv_heads, 1600, K then V]."""
    return torch.zeros(pages, NUM_KV_HEADS, VLLM_PAGE, 2 * HEAD_DIM, dtype=like.dtype, device=like.device)


def _fill(cache: Tensor, pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Write one sequence's K and V [tokens, kv_heads, head_dim] into its pages, the last page's rest zeros."""
    for at, plane in ((0, k), (HEAD_DIM, v)):
        padded = torch.zeros(len(pages) * VLLM_PAGE, *plane.shape[1:], dtype=plane.dtype, device=plane.device)
        padded[: len(plane)] = plane
        cache[pages.long(), :, :, at : at + HEAD_DIM] = padded.view(-1, VLLM_PAGE, *plane.shape[1:]).transpose(1, 2)


def _split(cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as the kernel takes them, [pages, 1600, kv_heads, head_dim]."""
    return cache[..., :HEAD_DIM].transpose(1, 2), cache[..., HEAD_DIM:].transpose(1, 2)


def vllm_prefill(case: Case, given: made.Prefill) -> Work:
    _bf16_only(case, "vLLM")
    attend, where = vllm_module("attention").qsa_sparse_paged_attention, given.q.device
    count = -(-case.ctx // VLLM_PAGE)
    table = torch.arange(count, dtype=torch.int32, device=where)[None]
    cache = _interleaved(count, given.q)
    _fill(cache, table[0], given.k[0], given.v[0])
    k, v = _split(cache)
    packed = torch.cat([given.ids[0], given.counts[:, None]], 1)
    requests = torch.zeros(case.rows, dtype=torch.int32, device=where)
    out = poisoned(*given.q.shape[1:], like=given.q)
    gate = torch.full((case.rows, NUM_Q_HEADS * HEAD_DIM), GATE, dtype=out.dtype, device=where)

    def launch() -> None:
        attend(given.q[0], k, v, packed, table, requests, True, out=out, output_gate=gate)

    return Work([launch], lambda _: out[given.checked], lambda _: given.sparse_reference)


def vllm_decode(case: Case, given: made.Decode) -> Work:
    _bf16_only(case, "vLLM")
    attend, where = vllm_module("attention").qsa_sparse_paged_attention, given.q.device
    sequences, count = given.page_table.shape[0], -(-case.ctx // VLLM_PAGE)
    tables = torch.randperm(sequences * count, generator=made.generator(where), device=where)
    tables = tables.int().view(sequences, count)
    cache = _interleaved(sequences * count, given.q)
    for number in range(sequences):
        k, v = (given.pool[pages.long()].flatten(0, 1)[: case.ctx, :, :HEAD_DIM] for pages in given.page_table[number])
        _fill(cache, tables[number], k, v)
    k_cache, v_cache = _split(cache)
    requests = torch.arange(case.batch, dtype=torch.int32, device=where)
    out = poisoned(case.batch, NUM_Q_HEADS, HEAD_DIM, like=given.q)
    gate = torch.full((case.batch, NUM_Q_HEADS * HEAD_DIM), GATE, dtype=out.dtype, device=where)
    launches = []
    for one in given.sets:
        packed = torch.cat([one.ids[:, 0], one.counts[:, None]], 1)
        call = functools.partial(
            attend, given.q[:, 0], k_cache, v_cache, packed, tables[one.sequences].contiguous(), requests, False
        )
        launches.append(functools.partial(call, out=out, output_gate=gate))
    return Work(launches, lambda _: out, given.reference)


# vLLM, indexer. Its scores are not scaled, which changes no selection.


def vllm_scores_prefill(case: Case, given: made.Scores) -> Work:
    _bf16_only(case, "vLLM")
    score, where = vllm_module("indexer")._prefill_logits, given.kbar.device
    blocks = case.ctx // BLOCK_TOKENS
    cache, tables = _key_cache(given.kbar)
    starts = made.ints([0, case.rows], where)
    scratch = poisoned(case.rows * blocks, like=given.kbar, dtype=torch.float32)
    launch = functools.partial(
        score, given.q_normed, cache, tables, starts, given.visible, scratch, case.rows, blocks, 0, case.rows
    )

    def got(_: int) -> Tensor:
        return scratch.view(case.rows, blocks)[given.checked] * INDEX_HEAD_DIM**-0.5

    return Work([launch], got, lambda _: given.reference)


def _key_cache(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Block keys [sequences, blocks, 128] as its cache [pages, 400, 1, 128], and the table [sequences, pages]."""
    sequences, blocks, dim = keys.shape
    count = -(-blocks // VLLM_KEY_PAGE)
    padded = torch.zeros(sequences, count * VLLM_KEY_PAGE, dim, dtype=keys.dtype, device=keys.device)
    padded[:, :blocks] = keys
    table = torch.arange(sequences * count, dtype=torch.int32, device=keys.device).view(sequences, count)
    return padded.view(-1, VLLM_KEY_PAGE, 1, dim), table


def vllm_scores_decode(case: Case, given: made.ScoresDecode) -> Work:
    _bf16_only(case, "vLLM")
    module, where = vllm_module("indexer"), given.pool.device
    tails = given.pool[:, ::BLOCK_TOKENS, 0, HEAD_DIM : HEAD_DIM + INDEX_HEAD_DIM]
    keys = torch.stack([tails[pages[1].long()].flatten(0, 1)[: given.num_blocks] for pages in given.page_table])
    cache, tables = _key_cache(keys)
    visible = torch.full((case.batch,), given.num_blocks, dtype=torch.int32, device=where)
    ids = torch.empty(case.batch, TOP_BLOCKS, dtype=torch.int32, device=where)
    kept: list[Tensor] = []

    def keep_logits(logits: Tensor, *_: object) -> None:
        kept[:] = [logits]

    def launch(table: Tensor) -> None:
        # Scores and top-k are one function there; the top-k, which the module looks up by name, is a case of its own.
        whole, module._topk = module._topk, keep_logits
        try:
            module.qsa_select_paged_decode(
                given.q_normed, cache, table, visible, TOP_BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS, 1, ids
            )
        finally:
            module._topk = whole

    launches = [functools.partial(launch, tables[sequences].contiguous()) for sequences in given.sets]
    return Work(launches, lambda _: kept[0][:, : given.num_blocks] * INDEX_HEAD_DIM**-0.5, given.reference)


def vllm_topk(case: Case, given: made.TopK) -> Work:
    module = vllm_module("indexer")
    if not (PEERS / "vllm_ops.so.xz").exists():
        raise UnavailableError(f"{PEERS} lacks vLLM's compiled operators (vllm_ops.so.xz)")
    _load_vllm_topk()
    ids = torch.full((case.rows, TOP_BLOCKS), -1, dtype=torch.int32, device=given.logits.device)
    scratch = torch.zeros(module._TOPK_WORKSPACE_BYTES, dtype=torch.uint8, device=ids.device)
    tokens = TOP_BLOCKS * BLOCK_TOKENS
    launch = functools.partial(module._topk, given.logits, given.visible, tokens, BLOCK_TOKENS, ids, scratch)
    return Work([launch], lambda _: best_values(given.logits, ids), lambda _: given.reference, atol=0.0, rtol=0.0)


@functools.cache
def _load_vllm_topk() -> None:
    _peers().load_vllm_topk()


# SGLang.


@functools.cache
def _sglang() -> Any:
    found = _peers().sglang()
    if found is None:
        raise UnavailableError(f"{PEERS} lacks SGLang's kernels")
    return found


def sglang_prefill(case: Case, given: made.Prefill) -> Work:
    """Its chunked prefill over K and V packed beforehand, in the fastest of the configurations."""
    module, where = _sglang(), given.q.device
    starts, keys = made.ints([0, case.rows], where), made.ints([0, case.ctx], where)
    kept: list[Tensor] = []

    def launch(config: tuple[int, int, int]) -> None:
        module._get_best_config = lambda total_q: config
        kept[:] = [
            module.sparse_gqa_fwd_interface_triton_ck(
                given.q[0],
                given.k[0],
                given.v[0],
                given.ids[0],
                starts,
                keys,
                given.context_lengths,
                made.SCALE,
                max_q=case.rows,
            )
        ]

    best = min(SGLANG_CONFIGS, key=lambda config: _microseconds(functools.partial(launch, config)))
    return Work([functools.partial(launch, best)], lambda _: kept[0][given.checked], lambda _: given.sparse_reference)


def _microseconds(launch: Callable[[], object], repeats: int = 3) -> float:
    launch()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


# Dense attention: what a host without sparsity would run.


def torch_dense(case: Case, given: made.Prefill) -> Work:
    """torch's scaled_dot_product_attention, cuDNN backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (plane.transpose(1, 2) for plane in (given.q, given.k, given.v))
    kept: list[Tensor] = []

    def launch() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            kept[:] = [
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=made.SCALE, enable_gqa=True
                )
            ]

    try:
        launch()
    except RuntimeError as error:
        raise UnavailableError(f"cuDNN attention refuses: {str(error).splitlines()[0]}") from None
    return Work([launch], lambda _: kept[0][0, :, given.checked].transpose(0, 1), lambda _: given.dense_reference)


def fa4_dense(case: Case, given: made.Prefill) -> Work:
    """FlashAttention-4's CuTe DSL kernel."""
    try:
        attend = importlib.import_module("flash_attn.cute").flash_attn_func
    except (ImportError, AttributeError) as error:
        raise UnavailableError(f"FlashAttention-4 does not import: {error}") from None
    kept: list[Tensor] = []

    def launch() -> None:
        out = attend(given.q, given.k, given.v, softmax_scale=made.SCALE, causal=True)
        kept[:] = [out[0] if isinstance(out, tuple) else out]

    return Work([launch], lambda _: kept[0][0, given.checked], lambda _: given.dense_reference)


def torch_topk(case: Case, given: made.TopK) -> Work:
    values, ids = given.logits.topk(TOP_BLOCKS)
    launch = functools.partial(torch.topk, given.logits, TOP_BLOCKS, sorted=False, out=(values, ids))
    return Work([launch], lambda _: best_values(given.logits, ids), lambda _: given.reference, atol=0.0, rtol=0.0)
