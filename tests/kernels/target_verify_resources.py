"""Compiles the kernel of patch set triton_target_verify without a GPU, and says what each tile takes.

target_verify_resources.py KERNEL CAPABILITY SHAPE...    such as 120 (SM120), and JSON with fields of Shape
Prints a line of JSON for each shape: shared memory in bytes, registers and stack (spills) of a thread, and
for each of REQUESTS the programs of a multiprocessor. A shape that is left to SGLang's kernel has none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from target_verify_numerics import TYPES, load
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SIGNATURES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
MULTIPROCESSORS = {90: 132, 120: 188}
"""Of an H200 and an RTX PRO 6000. Source: NVIDIA's data sheets."""
REQUESTS = (1, 8, 128)
"""By which tiles and splits are chosen: one request, keys that are split, and keys that are not."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Shape:
    """A model's heads and sizes on one GPU, and how many tokens are drafted."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    drafted: int = 4
    dtype: str = "bfloat16"
    cache_dtype: str | None = None


class Compiler:
    """Stands for a launch: compiles what would be launched, as Triton specialises it, and notes its resources."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.resources: list[dict[str, Any]] = []

    def launch(self, kernel: Any, *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:  # noqa: ARG002
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        bound = dict(zip((parameter.name for parameter in kernel.params), values, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = bound[parameter.name]
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = SIGNATURES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[parameter.name] = "i32"
                if value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32"
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=self.target, options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
        self.resources.append({"kernel": kernel.__name__, "shared": compiled.metadata.shared, "registers": registers, "stack": stack})


def main() -> None:
    kernel, capability = load(Path(sys.argv[1])), int(sys.argv[2])
    compiler = Compiler(capability)
    JITFunction.run = lambda self, *values, **named: compiler.launch(self, *values, **named)
    for text in sys.argv[3:]:
        shape = Shape(**json.loads(text))
        dtype = TYPES[shape.dtype]
        cache_dtype = TYPES[shape.cache_dtype or shape.dtype]
        keys = torch.zeros(64, shape.kv_heads, shape.head_size, dtype=cache_dtype)
        is_mla = shape.head_size in kernel.LATENT
        values = keys[..., : shape.value_size] if is_mla else torch.zeros(64, shape.kv_heads, shape.value_size, dtype=cache_dtype)
        queries = torch.zeros(2 * shape.drafted, shape.heads, shape.head_size, dtype=dtype)
        out = torch.zeros(2 * shape.drafted, shape.heads, shape.value_size, dtype=dtype)
        indptr, indices = torch.zeros(3, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
        rows = shape.drafted * shape.heads // shape.kv_heads
        gpu = kernel.Gpu((capability // 10, capability % 10), MULTIPROCESSORS[capability])
        compiler.resources.clear()
        choices = [kernel.choose(gpu, requests, shape.kv_heads, rows, shape.head_size, queries.element_size()) for requests in REQUESTS]
        for tile, splits in {(tile, min(splits, 2)) for tile, splits in filter(None, choices)}:
            mask = torch.zeros(64, dtype=torch.bool)
            kernel.attend(
                *(queries, out, keys, values, indptr, indices, indices, mask, indices, shape.drafted, 0.1, 1.0),
                tile=tile,
                splits=splits,
            )
        programs = [
            requests * shape.kv_heads * triton.cdiv(rows, choice[0].rows) * choice[1] / gpu.multiprocessors
            for requests, choice in zip(REQUESTS, choices, strict=True)
            if choice
        ]
        print(json.dumps({"kernels": compiler.resources, "programs": programs}), flush=True)


if __name__ == "__main__":
    main()
