"""Loads the peers' Triton files that lie beside it, without their packages: `bench.fetch_peers` puts it into .peers/ as
`peers.py`. What those files import is stubbed, none of which their kernels run.
"""

import functools
import importlib.util
import lzma
import sys
import tempfile
import types
from pathlib import Path

import triton
import triton.language as tl

HERE = Path(__file__).resolve().parent
PACKAGES = (
    *("vllm", "vllm.model_executor", "vllm.model_executor.warmup", "vllm.utils", "vllm.v1", "vllm.v1.attention"),
    *("vllm.v1.attention.ops", "sglang", "sglang.srt"),
)


@triton.jit
def _unpacked(scale):
    return scale


class _Anything:
    def __init__(self, *args, **kwargs):
        pass


def _platform():
    import torch

    major, minor = torch.cuda.get_device_capability()
    return types.SimpleNamespace(
        get_device_capability=lambda: (major, minor),
        has_device_capability=lambda least: 10 * major + minor >= least,
        is_device_capability_family=lambda family: major == family // 10,
    )


@functools.cache
def _stub_packages():
    members = {
        "vllm.envs": {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 512},
        "vllm.platforms": {"current_platform": _platform()},
        "vllm.triton_utils": {"HAS_TRITON": True, "tl": tl, "triton": triton},
        "vllm.utils.math_utils": {"round_up": lambda size, step: -(-size // step) * step},
        "vllm.utils.deep_gemm": {"mqa_logits_use_mx_scales": lambda *args, **kwargs: False},
        "vllm.v1.attention.ops.common": {"pack_ue8m0_x4": _unpacked},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {
            "TritonWarmupTensor": _Anything,
            "triton_scalar_specialization_rep": lambda value: value,
        },
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
    }
    for name in (*PACKAGES, *members):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__dict__.update(members.get(name, {}))
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]


@functools.cache
def _load(name):
    """The module of a file; None where it is not there."""
    path = HERE / f"{name}.py"
    if not path.exists():
        return None
    _stub_packages()
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vllm():
    """vLLM's modules: attention, indexer, kpool."""
    return types.SimpleNamespace(
        attention=_load("vllm_qsa"), indexer=_load("vllm_qsa_indexer"), kpool=_load("vllm_kpool")
    )


def sglang():
    """SGLang's sparse attention."""
    return _load("sglang_sparse_attn")


def load_vllm_topk():
    """torch.ops._C with vLLM's compiled operators: persistent_topk, cooperative_topk."""
    import torch

    with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as library:
        library.write(lzma.decompress((HERE / "vllm_ops.so.xz").read_bytes()))
    torch.ops.load_library(library.name)
    return torch.ops._C
