"""vLLM's QSA sparse attention, by its names and arguments, on our kernels. `hosts.vllm` re-exports these.

Nothing is compiled: the warm-up loads the cubins that calls will use. No call synchronises with the device; all may be
captured, once the warm-up (or a first call) has loaded the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.geometry import MAX_TOP_K
from qsa_cute.runners import checks
from qsa_cute.runners.paged_attention import PagedAttentionParams, PagedAttentionRunner
from qsa_cute.runners.splits import SM_COUNT, STAGE, of_cluster
from qsa_cute.runners.tensors import current_stream
from qsa_cute.runners.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor

MAX_LAYOUTS = 4096  # of calls, remembered with their checked parameters: 4 KiB each
WARPS = 8  # of a block that multiply
_FIELDS = ("q_ptr", "k_ptr", "v_ptr", "indices", "block_table", "token_to_req", "o_ptr", "gate_ptr")
_known: dict[tuple[Any, ...], tuple[PagedAttentionParams, Workspace | None]] = {}


def qsa_sparse_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logical_indices: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    use_prefill_config: bool,
    out: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    *,
    output_gate: Tensor,
) -> Tensor:
    """Gated sparse attention over paged K and V, vLLM's `qsa_sparse_paged_attention`.

    Args:
        q: bf16 [rows, q_heads, head_dim].
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], bf16 or fp8 e4m3, any strides but a unit inner one.
        logical_indices: int32 [rows, width + 1], tokens of the row's request, -1 for none; the last column counts them.
        block_table: int32 [requests, pages of a request]; token_to_req: int32 [rows].
        use_prefill_config: of vLLM's tuning; the same result either way.
        out: bf16 like q; made when None.
        k_scale, v_scale: of an fp8 cache: numbers, or one-element FP32 tensors, which are read on the device.
        output_gate: bf16, contiguous, as many elements as q.

    Returns: `out`: the attention output, rounded to bf16, times sigmoid(output_gate), rounded again.

    Raises:
        ArgumentError: an argument does not fit; nothing was launched.
        UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
    """
    import torch

    if not hasattr(q, "data_ptr"):
        raise ArgumentError(f"q is {checks.show(q)}; it takes a CUDA tensor")
    if out is None:
        out = torch.empty_like(q)
    given = (q, k_cache, v_cache, logical_indices, block_table, token_to_req, out, output_gate)
    layout: tuple[Any, ...] = ()
    known = None
    if not isinstance(k_scale, torch.Tensor) and not isinstance(v_scale, torch.Tensor):
        try:
            layout = (k_scale, v_scale, *[(one.shape, one.stride(), one.dtype, one.device) for one in given])
            known = _known.get(layout)
        except (AttributeError, TypeError):  # no tensors: the checks below say so
            layout = ()
    if known is None:
        params = PagedAttentionParams.from_tensors(
            *given[:7], gate=_gate(output_gate, q), k_scale=k_scale, v_scale=v_scale
        )
        wanted = PagedAttentionRunner.workspace_wanted(params)
        if wanted:
            memory = torch.empty(wanted.size, dtype=torch.uint8, device=q.device)
            params = params.with_workspace(wanted.addresses(memory.data_ptr()))
        if layout and params.rows:
            if len(_known) >= MAX_LAYOUTS:
                _known.clear()
            _known[layout] = params.moved(params.stream), wanted  # without what its launch will keep
    else:
        params, wanted = known
        addresses = {name: one.data_ptr() for name, one in zip(_FIELDS, given, strict=True)}
        if wanted:
            memory = torch.empty(wanted.size, dtype=torch.uint8, device=q.device)
            addresses |= wanted.addresses(memory.data_ptr())
        params = params.moved(current_stream(params.device, q), **addresses)
    PagedAttentionRunner.run(params)
    return out


def _gate(gate: Any, q: Any) -> Any:
    if not hasattr(gate, "numel"):
        raise ArgumentError(f"output_gate is {checks.show(gate)}; it takes a CUDA tensor")
    if gate.numel() != q.numel() or not gate.is_contiguous():
        raise ArgumentError(
            f"output_gate has shape {list(gate.shape)} and strides {list(gate.stride())}; it takes a contiguous tensor "
            f"of as many elements as q, {list(q.shape)}"
        )
    return gate.view(q.shape)


def warmup_qsa_sparse_paged_attention(
    kv_cache: Tensor,
    block_table: Tensor,
    *,
    num_query_heads: int,
    selection_width: int,
) -> tuple[tuple[int, int, int], ...]:
    """Load and check all that calls on this cache will use.

    Args:
        kv_cache: [pages, kv_heads, page_size, 2 * head_dim], K and V of a token side by side; bf16, fp8 e4m3, or uint8,
            which stands for fp8 e4m3.

        block_table: of vLLM's signature; any.
        selection_width: entries of a list, without the count.

    Returns: (entries of a tile, blocks that share a list, warps that multiply) of each configuration on SM90, sorted.

    Raises:
        UnsupportedError: no kernel covers these heads, this head dim, page size or type here.
        ArgumentError, ArtifactError, CaptureError, DriverError: see `errors`.
    """
    import torch

    if not hasattr(kv_cache, "data_ptr"):
        raise ArgumentError(f"kv_cache is {checks.show(kv_cache)}; it takes a CUDA tensor")
    if kv_cache.ndim != 4 or kv_cache.shape[3] % 2:
        raise ArgumentError(
            f"kv_cache has shape {list(kv_cache.shape)}; it takes [pages, kv_heads, page_size, 2 * head_dim]"
        )
    if kv_cache.device.type != "cuda":
        raise ArgumentError(f"kv_cache is on {kv_cache.device}; it takes a CUDA tensor")
    _, kv_heads, page_size, both = kv_cache.shape
    width = checks.integer("selection_width", selection_width, 1, MAX_TOP_K)
    kind = checks.dtype_name(kv_cache.dtype)
    kind = "fp8_e4m3" if kind == "u8" else kind
    major, minor = torch.cuda.get_device_capability(kv_cache.device)
    found = PagedAttentionRunner.can_implement(
        num_query_heads, kv_heads, both // 2, page_size, 10 * major + minor, kind
    )
    if not found:
        raise UnsupportedError(f"no sparse paged attention for this model here: {found.reason}")
    PagedAttentionRunner.preflight(kind, device=kv_cache.device.index, head_dim=both // 2)
    shares = {of_cluster(units, width) for units in range(1, SM_COUNT + 1)}
    return tuple(sorted((STAGE, share, WARPS) for share in shares))
