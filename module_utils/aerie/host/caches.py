"""Caches of compiled kernels and of what was once found out about the GPUs; stale ones outlive the driver that they were made with.

Standard library only: this runs on hosts. Each place is the default that the named project's own sources give.
"""

from __future__ import annotations

import re
from typing import Any

from ansible.module_utils.aerie.host.hosts import Host

USER_PLACES = (
    ("TRITON_CACHE_DIR", "~/.triton/cache", "triton"),
    ("FLASHINFER_WORKSPACE_BASE", "~/.cache/flashinfer", "flashinfer"),
    ("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions", "torch_extensions"),
    ("", "~/.cache/torch/kernels", "torch_kernels"),
    ("CUDA_CACHE_PATH", "~/.nv/ComputeCache", "cuda"),
    ("", "~/.deep_gemm", "deep_gemm"),
    ("", "~/.cache/deep_gemm", "deep_gemm"),
    ("", "~/.cache/tvm-ffi", "tvm_ffi"),
    ("", "~/.tilelang/cache", "tilelang"),
)
P2P_PLACES = (("SGLANG_CACHE_DIR", "~/.cache/sglang", "sglang_p2p"), ("VLLM_CACHE_ROOT", "~/.cache/vllm", "vllm_p2p"))
P2P_CACHE = re.compile(r"gpu_p2p_access_cache_for_.*\.json")
RELEASE_PLACES = ("triton", "flashinfer", "inductor", "deep_gemm", "tilelang", "cuda", "sglang")
RELEASE_CACHE = re.compile(r"\d[\w.+]*-[0-9a-f]{12}-.+")


def read_caches(host: Host, aerie_root: str | None) -> list[dict[str, Any]]:
    """Return the caches that are there, those of the user first."""
    home, environment = host.environment.get("HOME", ""), host.environment
    found: list[dict[str, Any]] = []

    def add(path: str, kind: str, *, keyed: bool = False) -> None:
        entry = host.stat(path)
        if entry and path not in (cache["path"] for cache in found):
            found.append({"path": path, "kind": kind, "age_s": entry.age_s, "release_keyed": keyed})

    def of_user(variable: str, place: str) -> list[str]:
        at_home = [place.replace("~", home, 1)] if home else []
        return [*([environment[variable]] if environment.get(variable) else []), *at_home]

    for variable, place, kind in USER_PLACES:
        for path in of_user(variable, place):
            add(path, kind)
    for name in host.names("/tmp") or ():
        if name.startswith("torchinductor_"):
            add(f"/tmp/{name}", "inductor")
    for variable, place, kind in P2P_PLACES:
        for directory in of_user(variable, place):
            for name in host.names(directory) or ():
                if P2P_CACHE.fullmatch(name):
                    add(f"{directory}/{name}", kind)
    if aerie_root:
        base = f"{aerie_root}/caches"
        for name in host.names(base) or ():
            if RELEASE_CACHE.fullmatch(name):
                _add_release(host, f"{base}/{name}", add)
    return found


def _add_release(host: Host, directory: str, add: Any) -> None:
    names = host.names(directory) or ()
    add(directory, "aerie", keyed=True)
    for kind in RELEASE_PLACES:
        if kind in names:
            add(f"{directory}/{kind}", kind, keyed=True)
    for name in host.names(f"{directory}/sglang") or ():
        if P2P_CACHE.fullmatch(name):
            add(f"{directory}/sglang/{name}", "sglang_p2p", keyed=True)
