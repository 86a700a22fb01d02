"""vLLM 0.33's functions of the QSA indexer, on our kernels: same names, arguments, defaults and results.

Each checks its tensors' shapes, strides and types before it launches anything, and raises `ArgumentError` or
`UnsupportedError`; none synchronises with the device; memory comes from `torch.empty` only, as vLLM's own does. The
kernels are loaded by the first call, or by the warm-up, which has to come before a capture.

Differences that a caller may see: ids of a row ascend; ties go to the lower block; a page outside the cache counts as
keys of zeros; a row that no request has, and what a row does not fill, is -1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks
from qsa_cute.runners.dispatch import capability
from qsa_cute.runners.indexer_launch import Launch
from qsa_cute.runners.paged_select import (
    ITEM_BYTES,
    SELECT_DTYPE,
    TOKEN_TOP_K,
    ExpandCounted,
    PagedScores,
    PagedScoresDecode,
    PagedSelectDecode,
    PagedSelectRunner,
    one_launch_pays,
    require,
    select_ids,
)
from qsa_cute.runners.tensors import Binder
from qsa_cute.runtime import default_loader
from qsa_cute.support import Support, SupportCode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_LOGITS_MB = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"  # vLLM's own variable, and its default
DEFAULT_LOGITS_MB = 512
ROW_STEP = 128  # rows of a chunk: a multiple of this, the largest tile of the scores
COLUMN_STEP = 64  # of the width of a prefill's logits
_WARMUP_COLUMNS = 64  # of vLLM's decode programs, whose grouping names the warm-up's profiles
_WARMUP_PROGRAMS = (16384, 32768, 131072)
_KEPT = 1024  # calls whose launches are kept

Launches = tuple[Launch, ...]


class _Call:
    """What the launches of a call are, for tensors that lie where they lay.

    Attributes:
        words: of FP32 scratch.
    """

    def __init__(self, words: int, build: Callable[[int], Launches]) -> None:
        self.words = words
        self._build = build
        self._made: dict[int, Launches] = {}

    def at(self, scratch: int) -> Launches:
        """The launches with their scratch at this address."""
        found = self._made.get(scratch)
        if found is None:
            if len(self._made) >= 8:
                self._made.clear()
            found = self._made[scratch] = self._build(scratch)
        return found


_calls: dict[Any, _Call] = {}
_loaded: set[tuple[int, str]] = set()


def _key(*tensors: Tensor) -> tuple[Any, ...]:
    """All that a launch takes from its tensors, and the stream that it goes to."""
    found: list[Any] = []
    for tensor in tensors:
        if not hasattr(tensor, "data_ptr"):
            raise ArgumentError(f"{checks.show(tensor)} is given where a CUDA tensor belongs")
        found += (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    device = tensors[0].device
    return (*found, device, _stream(device))


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def _find(key: tuple[Any, ...], make: Callable[[], _Call]) -> _Call:
    try:
        found = _calls.get(key)
    except TypeError:  # a number that has no hash: the checks say whether it is one
        return make()
    if found is None:
        made = make()
        if len(_calls) >= _KEPT:
            _calls.clear()
        found = _calls[key] = made
    return found


def _load(device: int, dtype: str, stream: int) -> None:
    """Load what calls of this type may run, once; "" is what has no type, which comes with any."""
    if (device, dtype) not in _loaded:
        import torch

        with torch.cuda.device(device):
            PagedSelectRunner.preflight(dtype or "bf16", stream, device)
        _loaded.update({(device, dtype), (device, "")})


def _sm(device: int) -> str:
    return "{}{}".format(*capability(default_loader(), device))


def _run(call: _Call, like: Tensor) -> None:
    if not call.words:
        for launch in call.at(0):
            launch.run(SELECT_DTYPE)
        return
    import torch

    scratch = torch.empty(call.words, dtype=torch.float32, device=like.device)
    for launch in call.at(scratch.data_ptr()):
        launch.run(SELECT_DTYPE)


# Expansion.


def expand_qsa_block_indices(
    block_indices: Tensor,
    query_positions: Tensor,
    visible_blocks: Tensor,
    compress_ratio: int,
    token_topk: int,
    out: Tensor,
) -> None:
    """Expand block ids to counted lists: the tokens of a row's blocks, those of its open block, then -1; the last
    column is the number of tokens.

    Args:
        block_indices: int32 [rows, token_topk / 4]; the first min(visible_blocks, width) of a row are read.
        query_positions: int32 or int64 [rows].
        visible_blocks: int32 [rows].
        compress_ratio: 4.
        token_topk: a multiple of it.
        out: int32 [rows, token_topk + 4].

    Raises:
        ArgumentError, UnsupportedError: see the module.
    """
    key = (compress_ratio, token_topk, *_key(block_indices, query_positions, visible_blocks, out))
    call = _find(
        key,
        lambda: _expand(block_indices, query_positions, visible_blocks, compress_ratio, token_topk, out, key[-1]),
    )
    _run(call, out)


def _expand(
    block_indices: Tensor,
    query_positions: Tensor,
    visible_blocks: Tensor,
    compress_ratio: int,
    token_topk: int,
    out: Tensor,
    stream: int,
) -> _Call:
    top = _blocks(token_topk, compress_ratio)
    binder = Binder()
    lists = binder.take("out", out, f"rows {token_topk + compress_ratio}", "i32")
    ids = binder.take("block_indices", block_indices, f"rows {top}", "i32")
    rows = binder.size("rows")
    if query_positions.shape != visible_blocks.shape:
        raise ArgumentError(
            f"query_positions has shape {list(query_positions.shape)}, visible_blocks {list(visible_blocks.shape)}; "
            "they must be equal"
        )
    kind = "i64" if checks.dtype_name(query_positions.dtype) == "i64" else "i32"
    positions = binder.take("query_positions", _flat(query_positions), "rows", kind, True)
    visible = binder.take("visible_blocks", _flat(visible_blocks), "rows", "i32", True)
    launch = ExpandCounted(
        out_ptr=lists.pointer,
        block_indices=ids.pointer,
        query_positions=positions.pointer,
        visible_blocks=visible.pointer,
        num_rows=rows,
        top_blocks=top,
        positions_step=1 if kind == "i32" else 2,
        out_stride_row=lists.strides[0],
        blocks_stride_row=ids.strides[0],
        stream=stream,
        device=binder.device,
    )
    if rows:
        _load(binder.device, "", stream)
    return _Call(0, lambda _: (launch,))


def _blocks(token_topk: int, compress_ratio: int) -> int:
    if checks.whole(compress_ratio) != geometry.BLOCK_TOKENS:
        require(
            Support.no(
                SupportCode.TOP_K,
                f"blocks of {checks.show(compress_ratio)} tokens; the kernels take {geometry.BLOCK_TOKENS}",
            )
        )
    tokens = checks.integer("token_topk", token_topk, compress_ratio, checks.INT32_MAX - 8)
    if tokens % compress_ratio:
        raise ArgumentError(f"token_topk is {tokens}; it takes a multiple of compress_ratio, {compress_ratio}")
    return tokens // compress_ratio


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.dim() != 1 and tensor.is_contiguous() else tensor


# Decode.


def qsa_select_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int,
    block_indices: Tensor,
) -> None:
    """Score a request-major decode batch's compressed blocks and select the 512 best of each row.

    Args:
        q: bf16, fp16 or fp8 e4m3 [requests * decode_query_len, heads, 128], 1 to 4 heads, unit inner stride.
        k_cache: [pages, page_size, 1, 128], q's type, any strides but a unit inner one; page_size a multiple of 4.
        page_table: int32 [requests, max_pages].
        visible_blocks: int32 [rows]: columns past it are not read.
        token_topk, compress_ratio: 2048 and 4.
        decode_query_len: 1 to 8.
        block_indices: int32 [rows, 512], the output: ids ascend, then -1.

    Raises:
        ArgumentError, UnsupportedError: see the module.
    """
    if not q.shape[0]:
        return
    key = (token_topk, compress_ratio, decode_query_len, *_key(q, k_cache, page_table, visible_blocks, block_indices))
    call = _find(
        key,
        lambda: _decode(
            q, k_cache, page_table, visible_blocks, token_topk, compress_ratio, decode_query_len, block_indices, key[-1]
        ),
    )
    _run(call, q)


def _decode(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int,
    block_indices: Tensor,
    stream: int,
) -> _Call:
    binder, common = _common(q, k_cache, page_table, visible_blocks, token_topk, compress_ratio, decode_query_len)
    out = binder.take("block_indices", block_indices, f"rows {geometry.TOP_BLOCKS}", "i32")
    rows, requests = binder.size("rows"), binder.size("requests")
    if rows != requests * decode_query_len:
        raise ArgumentError(
            f"q has {rows} rows and page_table {requests} requests; with decode_query_len {decode_query_len} it takes "
            f"{requests * decode_query_len}"
        )
    columns = common["table_width"] * common["page_size"]
    stride = out.strides[0] or geometry.TOP_BLOCKS
    _load(binder.device, common["dtype"], stream)
    if _sm(binder.device) == "90" and one_launch_pays(decode_query_len, requests, columns):
        both = PagedSelectDecode(
            out_ptr=out.pointer,
            out_stride_row=stride,
            num_requests=requests,
            query_len=decode_query_len,
            stream=stream,
            **common,
        )
        return _Call(0, lambda _: (both,))

    def build(scratch: int) -> Launches:
        scores = PagedScoresDecode(
            logits_ptr=scratch,
            lengths_ptr=scratch + 4 * rows * columns,
            num_requests=requests,
            query_len=decode_query_len,
            stream=stream,
            **common,
        )
        return scores, select_ids(scores, rows, out.pointer, stride)

    return _Call(rows * (columns + 1), build)


def _common(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int = 1,
) -> tuple[Binder, dict[str, Any]]:
    """The fields that a prefill's scores and a decode's have in common."""
    binder = Binder()
    kind = checks.dtype_name(q.dtype) or "bf16"
    element = kind if kind in ITEM_BYTES else "bf16"
    queries = binder.take("q", q, "rows heads head_dim", element)
    keys = binder.take("k_cache", k_cache, "pages page_size 1 head_dim", element)
    table = binder.take("page_table", page_table, "requests table_width", "i32")
    visible = binder.take("visible_blocks", visible_blocks, "rows", "i32", contiguous=True)
    shape = (binder.size("heads"), binder.size("head_dim"), binder.size("page_size"))
    sm = _sm(binder.device)
    require(PagedSelectRunner.can_implement(*shape, token_topk, compress_ratio, sm, element, decode_query_len))
    return binder, {
        "q_ptr": queries.pointer,
        "k_cache_ptr": keys.pointer,
        "page_table": table.pointer,
        "visible_blocks": visible.pointer,
        "num_pages": binder.size("pages"),
        "page_size": binder.size("page_size"),
        "table_width": binder.size("table_width"),
        "dtype": element,
        "num_heads": binder.size("heads"),
        "q_stride_row": queries.strides[0],
        "q_stride_head": queries.strides[1],
        "cache_stride_page": keys.strides[0],
        "cache_stride_token": keys.strides[1],
        "page_table_stride": table.strides[0],
        "device": binder.device,
    }


# Prefill.


def qsa_select_paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    max_query_len: int,
    block_indices: Tensor,
    max_seq_len: int,
) -> None:
    """Score the compressed blocks of packed prefill rows and select the 512 best of each, in chunks of rows whose
    logits fit VLLM_SPARSE_INDEXER_MAX_LOGITS_MB (512).

    Args:
        q: [rows, heads, 128], k_cache, page_table, visible_blocks, block_indices: as for `qsa_select_paged_decode`.
        query_start_loc: int32 [requests + 1]; offsets may start above zero.
        max_query_len: most rows of a request.
        max_seq_len: longest context of the batch: no row sees more than a quarter of it.

    Raises:
        ArgumentError, UnsupportedError: see the module.
    """
    if not q.shape[0]:
        return
    limit = os.environ.get(MAX_LOGITS_MB)
    tensors = (q, k_cache, page_table, query_start_loc, visible_blocks, block_indices)
    key = (token_topk, compress_ratio, max_query_len, max_seq_len, limit, *_key(*tensors))
    call = _find(
        key,
        lambda: _prefill(*tensors, token_topk, compress_ratio, max_query_len, max_seq_len, _budget(limit), key[-1]),
    )
    _run(call, q)


def _budget(limit: str | None) -> int:
    """Bytes of logits."""
    try:
        megabytes = DEFAULT_LOGITS_MB if limit is None else int(limit)
    except ValueError:
        megabytes = 0
    if megabytes < 1:
        raise ArgumentError(f"${MAX_LOGITS_MB} is {limit!r}; it takes a number of MiB, at least 1")
    return megabytes << 20


def chunk_rows(rows: int, columns: int, budget: int) -> int:
    """Rows whose logits fit the budget at a time; at least 1."""
    fit = max(1, budget // (4 * max(1, columns)))
    return min(rows, fit // ROW_STEP * ROW_STEP or fit)


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    visible_blocks: Tensor,
    block_indices: Tensor,
    token_topk: int,
    compress_ratio: int,
    max_query_len: int,
    max_seq_len: int,
    budget: int,
    stream: int,
) -> _Call:
    binder, common = _common(q, k_cache, page_table, visible_blocks, token_topk, compress_ratio)
    out = binder.take("block_indices", block_indices, f"rows {geometry.TOP_BLOCKS}", "i32")
    starts = binder.take("query_start_loc", query_start_loc, "offsets", "i32", contiguous=True)
    rows, requests = binder.size("rows"), binder.size("requests")
    if starts.shape[0] != requests + 1:
        raise ArgumentError(
            f"query_start_loc has {starts.shape[0]} offsets for the {requests} requests of page_table; it takes "
            f"{requests + 1}"
        )
    longest = checks.integer("max_seq_len", max_seq_len, 0)
    blocks = -(-longest // geometry.BLOCK_TOKENS)
    columns = -(-blocks // COLUMN_STEP) * COLUMN_STEP
    columns = min(max(COLUMN_STEP, columns), common["table_width"] * common["page_size"])
    step = chunk_rows(rows, columns, budget)
    stride = out.strides[0] or geometry.TOP_BLOCKS

    def build(scratch: int) -> Launches:
        found: list[Launch] = []
        for start in range(0, rows, step):
            scores = PagedScores(
                logits_ptr=scratch,
                lengths_ptr=scratch + 4 * step * columns,
                query_start_loc=starts.pointer,
                num_requests=requests,
                total_rows=rows,
                row_start=start,
                num_rows=min(step, rows - start),
                max_query_len=max_query_len,
                num_columns=columns,
                stream=stream,
                **common,
            )
            found += scores, select_ids(scores, min(step, rows - start), out.pointer + 4 * start * stride, stride)
        return tuple(found)

    _load(binder.device, common["dtype"], stream)
    return _Call(step * (columns + 1), build)


# Warm-up.


def warmup_qsa_mqa_paged_decode(
    k_cache: Tensor,
    page_table: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    max_decode_query_len: int,
    max_num_reqs: int,
    max_num_batched_tokens: int,
) -> tuple[tuple[int, int], ...]:
    """Load and check the kernels that decode and prefill will use. Nothing is compiled or launched.

    Args:
        k_cache, page_table: as for `qsa_select_paged_decode`.
        num_heads, head_dim: of the queries to come.
        max_decode_query_len, max_num_reqs, max_num_batched_tokens: what the engine was set up for.

    Returns: vLLM's profiles: for each query length up to the longest, the least number of requests of each of its
        decode kernel's groupings, as (query length, requests); () where there is none, and then nothing is loaded.

    Raises:
        ArgumentError, UnsupportedError: see the module.
        ArtifactError, DriverError: loading failed.
    """
    profiles = warmup_profiles(
        max_decode_query_len, max_num_reqs, max_num_batched_tokens, page_table.shape[1] * k_cache.shape[1]
    )
    if profiles:
        binder = Binder()
        stored = checks.dtype_name(k_cache.dtype) or ""
        element = {"u8": "fp8_e4m3"}.get(
            stored, stored if stored in ITEM_BYTES else "bf16"
        )  # u8: an e4m3 cache's bytes
        binder.take("k_cache", k_cache, f"pages page_size 1 {head_dim}", "u8" if stored == "u8" else element)
        shape = (num_heads, head_dim, k_cache.shape[1], TOKEN_TOP_K, geometry.BLOCK_TOKENS, _sm(binder.device), element)
        require(PagedSelectRunner.can_implement(*shape, profiles[-1][0]))
        _load(binder.device, element, _stream(k_cache.device))
    return profiles


def warmup_profiles(
    max_query_len: int, max_requests: int, max_tokens: int, columns: int
) -> tuple[tuple[int, int], ...]:
    """(query length, requests) as vLLM's warm-up gives them."""
    programs = max(1, -(-columns // _WARMUP_COLUMNS))
    first_of_group = sorted({1, *(-(-least // programs) for least in _WARMUP_PROGRAMS)})
    return tuple(
        (length, requests)
        for length in range(1, max_query_len + 1)
        for requests in first_of_group
        if requests <= min(max_requests, max_tokens // length)
    )


__all__ = [
    "expand_qsa_block_indices",
    "qsa_select_paged_decode",
    "qsa_select_paged_prefill",
    "warmup_qsa_mqa_paged_decode",
]
