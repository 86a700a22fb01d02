"""vLLM 0.33's QSA functions on our kernels: import them from here, or put them into an installed vLLM with `install`.

Importing this module loads neither torch nor vLLM; each function is imported when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from qsa_cute.errors import ArgumentError, ArtifactError, CaptureError, OverlapError, UnsupportedError

_log = logging.getLogger("qsa_cute")

ENVIRONMENT = "QSA_CUTE_VLLM"
PACKAGE = "vllm.models.qwen4_exp.nvidia.ops"  # where vLLM has the functions

# vLLM's module -> its functions -> our module.
_SELECT, _ATTENTION = "qsa_cute.hosts.vllm_select", "qsa_cute.hosts.vllm_attention"
FUNCTIONS = {
    "qsa_indexer": {
        "expand_qsa_block_indices": _SELECT,
        "qsa_select_paged_decode": _SELECT,
        "qsa_select_paged_prefill": _SELECT,
        "warmup_qsa_mqa_paged_decode": _SELECT,
    },
    "qsa": {
        "qsa_sparse_paged_attention": _ATTENTION,
        "warmup_qsa_sparse_paged_attention": _ATTENTION,
    },
}
_HOMES = {name: home for functions in FUNCTIONS.values() for name, home in functions.items()}

__all__ = ["install", "plugin", "uninstall", *_HOMES]

_REFUSALS = (ArgumentError, UnsupportedError, ArtifactError, CaptureError)  # raised before anything is launched
_LOGGED = 8  # reasons a function that are logged; shapes could make any number
_REFUSED = 4096  # calls a function that are not asked again; lengths make any number of them

# Function's name -> (vLLM's own, ours in its place).
_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qsa_cute.hosts.vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def install() -> tuple[str, ...]:
    """Put our functions in the place of vLLM's: in the module that defines each and in all that imported it by name.

    A call that ours cannot take (shape, type, SM, artifact, first use under capture) goes to vLLM's own, and the reason
    is logged once, as a warning of the logger "qsa_cute". A function whose parameters are not those of vLLM 0.33 stays.
    Idempotent. Touches no device.

    Returns: names of the functions that are ours now.

    Raises:
        UnsupportedError: there is no vLLM with these modules; nothing was replaced.
    """
    modules = {name: _import(f"{PACKAGE}.{name}") for name in FUNCTIONS}
    for module_name, functions in FUNCTIONS.items():
        for name, home in functions.items():
            original = getattr(modules[module_name], name, None)
            if name in _installed or importlib.util.find_spec(home) is None:
                continue
            ours = getattr(importlib.import_module(home), name)
            found = "nothing of that name" if original is None else str(parameters(original))
            if original is None or parameters(original) != parameters(ours):
                _log.warning("%s stays vLLM's own: it has %s, ours %s", name, found, parameters(ours))
                continue
            replacement = _guarded(name, original, ours)
            _rebind(original, replacement)
            _installed[name] = (original, replacement)
    _log.info("vLLM's functions replaced: %s", ", ".join(_installed) or "none")
    return tuple(_installed)


def uninstall() -> None:
    """Put vLLM's own functions back, everywhere. Nothing to do where none is replaced."""
    while _installed:
        original, replacement = _installed.popitem()[1]
        _rebind(replacement, original)


def plugin() -> None:
    """vLLM's entry point (group `vllm.general_plugins`): `install` where $QSA_CUTE_VLLM is 1.

    Raises:
        ArgumentError: it is neither 0 nor 1.
    """
    wanted = os.environ.get(ENVIRONMENT) or "0"
    if wanted not in ("0", "1"):
        raise ArgumentError(f"${ENVIRONMENT} is {wanted!r}; it takes 1 (use qsa-cute's kernels) or 0")
    if wanted == "1":
        try:
            install()
        except UnsupportedError as error:
            _log.warning("vLLM keeps its own functions: %s", error)


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
    """(name, kind, default) of each parameter; "" for no default."""
    return [
        (one.name, one.kind.name, "" if one.default is one.empty else repr(one.default))
        for one in inspect.signature(function).parameters.values()
    ]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a vLLM for another platform says
        raise UnsupportedError(f"{name} does not import ({error}); install() needs vLLM 0.33") from None


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Let every name of every module that is bound to `old` be `new`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name, value in list(names.items()) if value is old]:
                setattr(module, name, new)


def _guarded(name: str, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, and `original` where that refuses: what it refuses once it is not asked again."""
    refused: set[Any] = set()
    logged: set[str] = set()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if refused and _known(refused, args, kwargs):
            return original(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except _REFUSALS as error:
            reason = str(error)
            if not isinstance(error, (CaptureError, OverlapError)):  # the same shape may do next time
                _remember(refused, args, kwargs)
        if reason not in logged and len(logged) < _LOGGED:
            logged.add(reason)
            _log.warning("%s falls back to vLLM's own: %s", name, reason)
        return original(*args, **kwargs)

    return call


def _known(refused: set[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        return _shapes(args, kwargs) in refused
    except TypeError:  # a value that has no hash
        return False


def _remember(refused: set[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(refused) >= _REFUSED:
        refused.clear()
    with contextlib.suppress(TypeError):
        refused.add(_shapes(args, kwargs))


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a refusal may depend on."""
    return (*map(_shape, args), *((name, _shape(kwargs[name])) for name in sorted(kwargs)))


def _shape(value: Any) -> Any:
    if not hasattr(value, "data_ptr"):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16
