"""Brings the peers' published kernels into .peers/, which git ignores: they are measured beside ours, and only read.

python -m bench.fetch_peers [--with-topk]
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import click

PEERS = Path(__file__).resolve().parents[1] / ".peers"
# Wheel -> its files, and what they are called here.
FILES: Mapping[str, Mapping[str, str]] = {
    "vllm==0.33.0": {
        "vllm/models/qwen4_exp/nvidia/ops/qsa.py": "vllm_qsa.py",
        "vllm/models/qwen4_exp/nvidia/ops/qsa_indexer.py": "vllm_qsa_indexer.py",
        "vllm/models/glm5next/nvidia/ops/kpool_compress.py": "vllm_kpool.py",
    },
    "sglang==0.5.23": {"sglang/srt/layers/attention/qsa/sparse_attn.py": "sglang_sparse_attn.py"},
}
OPERATORS = "vllm/_C_stable_libtorch.abi3.so"


def download(requirement: str, folder: Path) -> Path:
    """The wheel, without what it needs."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    return next(folder.glob(f"{requirement.split('==')[0]}-*.whl"))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--with-topk", is_flag=True, help="vLLM's compiled operators too, for its top-k: 61 MB packed.")
@click.option("--dest", type=click.Path(file_okay=False, path_type=Path), default=PEERS, help="Folder; default .peers.")
def main(with_topk: bool, dest: Path) -> None:
    """Download the wheels of vLLM and SGLang with pip, and keep the files that the benchmark and the tests read.

    Exit codes: 0 done; 1 pip failed.
    """
    dest.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("peer_loader.py"), dest / "peers.py")
    for requirement, files in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                wheel = download(requirement, Path(folder))
            except subprocess.CalledProcessError as error:
                raise click.ClickException(
                    f"pip could not download {requirement} (exit code {error.returncode})"
                ) from None
            with zipfile.ZipFile(wheel) as archive:
                for member, name in files.items():
                    (dest / name).write_bytes(archive.read(member))
                    click.echo(dest / name)
                if with_topk and requirement.startswith("vllm"):
                    (dest / "vllm_ops.so.xz").write_bytes(lzma.compress(archive.read(OPERATORS), preset=6))
                    click.echo(dest / "vllm_ops.so.xz")


if __name__ == "__main__":
    main()
