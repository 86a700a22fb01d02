"""What the runners share: whether a kernel covers a shape, which variant to ask for, and loading beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from qsa_cute import geometry
from qsa_cute.errors import UnsupportedError
from qsa_cute.runners.checks import SM_FORMS, build_target, capability_of, dtype_name, show, whole
from qsa_cute.runtime import Loader, Wanted
from qsa_cute.support import Support, SupportCode
from qsa_cute.variants import KERNELS, variants

Baked = tuple[tuple[str, int], ...]  # a variant's constants by name

SM90 = (9, 0)  # the compute capability that sm_90a kernels run on

# (context, device asked for) -> compute capability.
_capabilities: dict[tuple[int, int], tuple[int, int]] = {}
_wanted: dict[tuple[str, int, object, Baked], Wanted] = {}


def attention_support(
    kernel: str, num_q_heads: object, num_kv_heads: object, head_dim: object, sm_version: object, dtype: object
) -> Support:
    """Whether `kernel` is built for this shape, type and SM. Never raises, whatever it is given."""
    q_heads, kv_heads, dim = whole(num_q_heads), whole(num_kv_heads), whole(head_dim)
    if not q_heads or not kv_heads or q_heads < 1 or kv_heads < 1 or q_heads % kv_heads:
        heads = f"{show(num_q_heads)} query heads over {show(num_kv_heads)} KV heads"
        return Support.no(SupportCode.HEADS, f"{heads}: the first must be a multiple of the second, both at least 1")
    if q_heads // kv_heads > geometry.MAX_GROUP_SIZE:
        group = q_heads // kv_heads
        reason = f"{show(group)} query heads a KV head; the kernels take 1 to {geometry.MAX_GROUP_SIZE}"
        return Support.no(SupportCode.GROUP_SIZE, reason)
    if dim not in geometry.SUPPORTED_HEAD_DIMS:
        dims = ", ".join(map(str, geometry.SUPPORTED_HEAD_DIMS))
        return Support.no(SupportCode.HEAD_DIM, f"head dim {show(head_dim)}; built are {dims}")
    return target_support(kernel, dim, sm_version, dtype)


def target_support(kernel: str, head_dim: int, sm_version: object, dtype: object) -> Support:
    """Whether `kernel` is built with this head dim for this type and SM. Never raises."""
    sm = build_target(sm_version)
    targets = KERNELS[kernel].sms
    if sm is None or sm not in targets:
        reason = f"SM {show(sm_version)}; targets of the build are {', '.join(targets)}"
        unknown = "" if capability_of(sm_version) else f"; an SM is given as {SM_FORMS}"
        return Support.no(SupportCode.SM, reason + unknown)
    built = [one for one in KERNELS[kernel].dtypes if variants([sm], kernel, [head_dim], [one])]
    if dtype_name(dtype) not in built:
        return Support.no(SupportCode.DTYPE, f"type {show(dtype)}; built for {sm} are {', '.join(built)}")
    return Support.yes()


def wanted(kernel: str, head_dim: int, dtype: object, baked: Baked = ()) -> Wanted:
    """The variant to ask the loader for, remembered: one look-up on the launch path.

    Args:
        baked: constants of the kernels that have several sets; the others are known without.

    Raises:
        UnsupportedError: no such type.
    """
    try:
        return _wanted[kernel, head_dim, dtype, baked]
    except (KeyError, TypeError):  # not asked yet, or not even hashable
        name = dtype_name(dtype)
        dtypes = KERNELS[kernel].dtypes
        if name not in dtypes:
            raise UnsupportedError(f"no {kernel} for type {show(dtype)}; built are {', '.join(dtypes)}") from None
        return _wanted.setdefault((kernel, head_dim, dtype, baked), Wanted(kernel, head_dim, name, baked))


def preload(loader: Loader, each: Sequence[Wanted], device: int | None, stream: int | None, strict: bool) -> None:
    """Load these variants into the context where they will run.

    Args:
        strict: every one must load. Otherwise those that the store does not have for the device are passed over, as
            long as it has one: a store may be built for one head dim only. One that is there and unsound is an error.

    Raises: as `Loader.kernel`.
    """
    if not strict:
        place = ordinal(loader, device)
        each = [variant for variant in each if loader.missing_reason(variant, place) is None] or each
    for variant in each:
        loader.kernel(variant, device, stream or 0)


def capability(loader: Loader, device: int) -> tuple[int, int]:
    """Of a device (-1: the current context's), remembered per context."""
    context = loader.driver.current_context()
    found = _capabilities.get((context, device))
    if found is None:
        found = loader.driver.capability(ordinal(loader, device))
        _capabilities[context, device] = found
    return found


def ordinal(loader: Loader, device: int | None) -> int:
    """The device itself; for None or -1 the current context's, and 0 where none is current."""
    if device is not None and device >= 0:
        return device
    return loader.driver.current_device() if loader.driver.current_context() else 0
