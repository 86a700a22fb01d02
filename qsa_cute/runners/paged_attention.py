"""Sparse attention over vLLM's paged cache by counted lists: parameters of a launch, and the runner.

Three algorithms compute the same. "tma" (SM90) copies whole 4-token blocks of a list as one; of few rows, the blocks of
a cluster share each list. "rows" (every SM) gives a block a row, or shares its list through a workspace. "shared"
(SM90) lets neighbouring rows share their gather, see `union_paged.py`: many rows. Their truth: `reference/paged.py`.
"""

from __future__ import annotations

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.runners import checks, dispatch, splits, union_paged
from qsa_cute.runners.paged_params import MAX_SPLITS, PAGE_STEP, ROWS, SHARED, TMA, PagedAttentionParams
from qsa_cute.runners.workspace import Workspace
from qsa_cute.runtime import Loader, Wanted, default_loader
from qsa_cute.support import Support, SupportCode

__all__ = ["PagedAttentionParams", "PagedAttentionRunner"]

_KERNELS: dict[str, tuple[str, dispatch.Baked]] = {
    ROWS: ("paged_attention", (("max_splits", MAX_SPLITS),)),
    TMA: ("paged_attention_tma", ()),
}


class PagedAttentionRunner:
    """Sparse attention over a paged cache. All methods are static; none synchronises."""

    def __new__(cls) -> PagedAttentionRunner:
        raise ArgumentError("PagedAttentionRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        num_q_heads: object,
        num_kv_heads: object,
        head_dim: object,
        page_size: object,
        sm_version: object,
        cache_dtype: object,
    ) -> Support:
        """Whether the kernels cover this shape, from numbers alone. Never raises.

        Args:
            page_size: tokens of a page of the cache.
            sm_version: such as 90 or "sm_90a"; cache_dtype: "bf16", "fp8_e4m3" or torch's type of the same.

        Returns: a `Support`, true or with its reason.
        """
        found = dispatch.attention_support(
            _KERNELS[ROWS][0], num_q_heads, num_kv_heads, head_dim, sm_version, cache_dtype
        )
        size = checks.whole(page_size)
        if found and (size is None or not PAGE_STEP <= size <= checks.INT32_MAX or size % PAGE_STEP):
            reason = f"pages of {checks.show(page_size)} tokens; it takes a multiple of {PAGE_STEP}"
            return Support.no(SupportCode.PAGE_SIZE, reason)
        return found

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def workspace_size(rows: int, num_kv_heads: int, head_dim: int) -> Workspace:
        """Memory for the partials and counters of "rows" with several splits, good for fewer rows too.

        Raises:
            ArgumentError: a size is out of range.
        """
        units = checks.integer("rows", rows, 0) * checks.integer("num_kv_heads", num_kv_heads, 1, checks.MAX_GRID_YZ)
        return Workspace.of(
            ("partial_o", "f32", (units * MAX_SPLITS, geometry.PARTIAL_ROWS, checks.head_dim(head_dim))),
            ("partial_stats", "f32", (units * MAX_SPLITS, 2, geometry.PARTIAL_ROWS)),
            ("split_counters", "i32", (units,)),
        )

    @staticmethod
    def workspace_wanted(params: PagedAttentionParams) -> Workspace | None:
        """Memory with which `run` would do these rows faster on their device, None where there is no such: for "shared"
        where many rows can share their gather, for "rows" where few rows cannot go by "tma". It may hold anything."""
        checks.instance("params", params, PagedAttentionParams)
        units, loader = params.rows * params.num_kv_heads, default_loader()
        if not units or params.algorithm is not None:
            return None
        if _is_sm90(loader, params.device):
            if union_paged.pays(params) and not params.unshared and not _missing(loader, params):
                return Workspace.of(("workspace", "i32", (-(-union_paged.workspace(params).size // 4),)))
            if params.map_strides is not None:
                return None
        if splits.of_workspace(units, params.width, MAX_SPLITS) == 1:
            return None
        return PagedAttentionRunner.workspace_size(params.rows, params.num_kv_heads, params.head_dim)

    @staticmethod
    def preflight(
        cache_dtype: object, stream: int | None = None, device: int | None = None, head_dim: int | None = None
    ) -> None:
        """Load what `run` may pick, in the current context or `device`'s. Idempotent; can be tried again.

        Args: as for `SparsePrefillRunner.preflight`.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        loader = default_loader()
        dims = geometry.SUPPORTED_HEAD_DIMS if head_dim is None else (checks.head_dim(head_dim),)
        sm90 = _is_sm90(loader, -1 if device is None else device)
        each = [_wanted(name, dim, cache_dtype) for name in ((TMA, ROWS) if sm90 else (ROWS,)) for dim in dims]
        if sm90:  # `run` does without where the store has none
            place = dispatch.ordinal(loader, device)
            shared = (one for dim in dims for one in _shared_wanted(dim, cache_dtype))
            each += [one for one in shared if loader.missing_reason(one, place) is None]
        dispatch.preload(loader, each, device, stream, strict=head_dim is not None)

    @staticmethod
    def run(params: PagedAttentionParams) -> None:
        """Launch on `params.stream`; nothing to do without rows. Allocates nothing, safe under capture.

        Raises:
            UnsupportedError: "tma" or "shared" is asked for where it is not built.
            CaptureError: the first use in this context is under capture; call `preflight` before.
            ArtifactError, DriverError: loading or launching failed.
            ArgumentError: params of another class.
        """
        checks.instance("params", params, PagedAttentionParams)
        if not params.rows:
            return
        loader, stream = default_loader(), params.stream
        algorithm, params = _pick(loader, params)
        if algorithm == SHARED:
            params.launches(loader).run(params, loader)
            return
        kernel = loader.peek(_wanted(algorithm, params.head_dim, params.cache_dtype), params.device, stream)
        if algorithm == TMA:
            kernel.launch(params.with_maps(loader), params.grid, stream, (1, params.num_splits, 1))
            return
        if params.num_splits > 1:
            # The kernel leaves them zero; the launch before may have been cut short, or been another's.
            kernel.zero(params.split_counters, params.rows * params.num_kv_heads, stream)
        kernel.launch(params, params.grid, stream)


def _wanted(algorithm: str, head_dim: int, cache_dtype: object) -> Wanted:
    name, baked = _KERNELS[algorithm]
    return dispatch.wanted(name, head_dim, cache_dtype, baked)


def _is_sm90(loader: Loader, device: int) -> bool:
    return dispatch.capability(loader, device) == dispatch.SM90


def _shared_wanted(head_dim: int, cache_dtype: object) -> list[Wanted]:
    kind = checks.dtype_name(cache_dtype) or ""
    return [dispatch.wanted(name, head_dim, dtype) for name, dtype in union_paged.kernels(kind)]


def _missing(loader: Loader, params: PagedAttentionParams) -> bool:
    """Whether the store in use lacks the kernels of "shared": it may be built for a part of the registry."""
    place = dispatch.ordinal(loader, params.device)
    return any(
        loader.missing_reason(one, place) is not None for one in _shared_wanted(params.head_dim, params.cache_dtype)
    )


def _pick(loader: Loader, params: PagedAttentionParams) -> tuple[str, PagedAttentionParams]:
    """The algorithm that does these rows, and its parameters. "shared" is named by who brings its workspace."""
    if params.algorithm == ROWS:
        return ROWS, params
    sm90 = _is_sm90(loader, params.device)
    if params.algorithm is not None:
        if not sm90:
            raise UnsupportedError(f"algorithm {params.algorithm!r} is built for sm_90a only; use {ROWS!r} or None")
        return params.algorithm, params
    if sm90 and params.map_strides is not None:
        return TMA, params
    return ROWS, params.as_rows()
