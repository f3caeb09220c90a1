"""Imports one library of a release and lets each GPU run a small kernel of it, compared with plain torch on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

from .common import Events, mapped_libraries, run, synchronize

MODULES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "kernel": ("sgl_kernel", "sglang_kernel"),
    "flashinfer": ("flashinfer",),
    "sglang": ("sglang",),
}
DISTRIBUTIONS = {"kernel": ("sglang-kernel", "sgl-kernel"), "flashinfer": ("flashinfer-python", "flashinfer")}
# Where SGLang has had the one Triton kernel of its own that is small and whose arguments did not change from 0.5.9 to 0.5.23.
KV_INDICES = (
    "sglang.kernels.ops.attention.kv_indices",
    "sglang.srt.layers.attention.triton_ops.kv_indices",
    "sglang.srt.layers.attention.utils",
)

Kernel = Callable[[Any, Any], float]
"""Runs on one device and returns the largest error against the reference."""


def version(library: str, module: Any) -> str | None:
    """Return the library's version, as it is installed."""
    for name in DISTRIBUTIONS.get(library, (library,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return getattr(module, "__version__", None)


def torch_kernel(torch: Any, device: Any) -> float:
    """A product of matrices of small whole numbers, which is exact in every precision of the multiplication."""
    left = torch.arange(64 * 64, device=device, dtype=torch.float32).reshape(64, 64) % 7
    right = torch.arange(64 * 64, device=device, dtype=torch.float32).reshape(64, 64) % 5
    known = (left.cpu().double() @ right.cpu().double()).float()
    return float(((left @ right).cpu() - known).abs().max())


def triton_kernel(torch: Any, device: Any) -> float:
    """The kernel of this project's own that follows a chain of places."""
    from .chase import chase

    chain = (torch.arange(1 << 10, dtype=torch.int64) * 405 + 12) % (1 << 10)
    known = 0
    for _ in range(100):
        known = int(chain[known])
    end = torch.zeros(1, dtype=torch.int64, device=device)
    chase[(1,)](chain.to(device), end, 100)
    return float(abs(int(end[0]) - known))


def rms_norm(function: Callable[..., Any]) -> Kernel:
    """Return the kernel that checks an RMS norm in bfloat16."""

    def kernel(torch: Any, device: Any) -> float:
        values = torch.arange(4 * 1024, device=device, dtype=torch.float32).reshape(4, 1024).remainder(13).sub(6).to(torch.bfloat16)
        weight = torch.arange(1024, device=device, dtype=torch.float32).remainder(3).add(1).to(torch.bfloat16)
        exact = values.float().cpu()
        known = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float().cpu()
        return float((function(values, weight, 1e-6).float().cpu() - known).abs().max())

    return kernel


def silu_and_mul(function: Callable[..., Any]) -> Kernel:
    """Return the kernel that checks SiLU times the other half in bfloat16."""

    def kernel(torch: Any, device: Any) -> float:
        values = torch.arange(4 * 512, device=device, dtype=torch.float32).reshape(4, 512).remainder(9).sub(4).to(torch.bfloat16)
        exact = values.float().cpu()
        known = exact[:, :256] * torch.sigmoid(exact[:, :256]) * exact[:, 256:]
        return float((function(values).float().cpu() - known).abs().max())

    return kernel


def kv_indices(function: Any) -> Kernel:
    """Return the kernel that checks SGLang's gathering of cache places."""

    def kernel(torch: Any, device: Any) -> float:
        table = torch.arange(4 * 64, dtype=torch.int32, device=device).reshape(4, 64)
        requests = torch.tensor([2, 0], dtype=torch.int32, device=device)
        lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
        found = torch.zeros(8, dtype=torch.int32, device=device)
        function[(2,)](table, requests, lengths, starts, None, found, table.shape[1])
        known = torch.cat([table[2, :5], table[0, :3]])
        return float((found - known).abs().max())

    return kernel


def choose(library: str, module: Any) -> tuple[str | None, Kernel | None]:
    """Return the name of a small kernel of the library, and how to check it; None where this version has none that we know."""
    if library == "torch":
        return "matrix product", torch_kernel
    if library == "triton":
        return "chain of loads", triton_kernel
    if library == "sglang":
        for name in KV_INDICES:
            try:
                place = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if not (error.name or "").startswith("sglang"):
                    raise
                continue
            if hasattr(place, "create_flashinfer_kv_indices_triton"):
                return "create_flashinfer_kv_indices_triton", kv_indices(place.create_flashinfer_kv_indices_triton)
        return None, None
    for name, check in (("rmsnorm", rms_norm), ("silu_and_mul", silu_and_mul)):
        if callable(function := getattr(module, name, None)):
            return name, check(function)
    return None, None


def main(request: dict[str, Any], events: Events) -> None:
    """Import the request's ``library`` and run its kernel on every visible GPU."""
    library = request["library"]
    found = [name for name in MODULES[library] if importlib.util.find_spec(name) is not None]
    events.figure("module", found[0] if found else None)
    if not found:
        return
    events.stage("import torch")
    import torch

    events.figure("torch", {"version": torch.__version__, "cuda": torch.version.cuda})
    events.stage(f"import {found[0]}")
    try:
        module = importlib.import_module(found[0])
        events.figure("version", version(library, module))
        events.stage(f"look for a kernel in {found[0]}")
        stand_in = bool(getattr(module, "__aerie_stand_in__", False))
        name, kernel = (None, None) if stand_in else choose(library, module)
    finally:
        events.figure("libraries", mapped_libraries())
    cuda = request.get("device", "cuda") == "cuda"
    if not cuda and library != "torch":
        name, kernel = None, None
    events.figure("kernel", name)
    if kernel is None:
        return
    for number, gpu in enumerate(request["gpus"]):
        events.stage(f"run {name} on GPU {gpu}" if cuda else f"run {name}")
        device = torch.device("cuda", number) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        error = kernel(torch, device)
        synchronize(torch, device)
        # bfloat16 keeps 8 bits, and the references reach about 16.
        if not error <= 0.125:
            events.problem(f"wrong result: {name} on GPU {gpu} is off by {error:g}", gpu=gpu)
        events.figure("error", {"gpu": gpu, "largest": error})
    events.figure("libraries", mapped_libraries())


if __name__ == "__main__":
    run(main)
