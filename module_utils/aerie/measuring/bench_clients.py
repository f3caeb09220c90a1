"""SGLang's own load clients, one way to call each, one form for what they say. Standard library only: this runs on hosts.

The Rust client is taken where the release ships it: it costs 5 to 7 CPU µs a token where the Python one costs 27, and at high
concurrency a slow client hides what the server can do. It is loaded straight from its shared object, because
``python -m sglang.benchmark.rust_client`` imports the sglang package, and with it torch, first: measured on 0.5.23, 4.5 s of
CPU against 0.03 s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_file

# run_argv returns the whole result as text, which as an exit status would print it and read as a failure.
RUST_LAUNCHER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_bench", sys.argv[1])
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)
client.run_argv(["sglang-bench", *sys.argv[2:]])
"""
LATENCIES = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "itl_ms": "itl_ms", "e2e_ms": "e2e_latency_ms"}
CLIENT_RESULT = untrusted.Limits(size=untrusted.RAW, finite=False)
"""A client writes NaN where nothing was measured: that figure is null, and the others hold."""
P99_REQUESTS = 1000
"""A 99th percentile of fewer requests is one or two requests' luck: it is left null."""


@dataclass(frozen=True)
class Client:
    """A load client of a release: what it is and the argv that starts it."""

    name: str
    version: str
    command: tuple[str, ...]
    sha256: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return what of the client defines a measurement."""
        return {"name": self.name, "version": self.version, "sha256": self.sha256}


@dataclass(frozen=True)
class Load:
    """One run of a client: where to send what, how much of it, and where to write the result."""

    host: str
    port: int
    tokenizer: Path | None
    workload: Mapping[str, Any]
    dataset: Path | None
    concurrency: int
    requests: int
    seed: int
    output: Path


def find(release: Path, version: str, tokenizer: Path | None = None, *, package: Path | None = None, chosen: Path | None = None) -> Client:
    """Return the best client that the release at ``release`` (a virtual environment) ships and that can read ``tokenizer``.

    The Rust client reads ``tokenizer.json`` only; models that come with another kind, such as tiktoken's, get the Python one.
    ``package`` says where the release's ``sglang`` is when it isn't in its site-packages; ``chosen`` is a Rust client of another SGLang.
    """
    python = release / "bin" / "python"
    packages = [package] if package else sorted(release.glob("lib/python3*/site-packages/sglang"))
    if not packages:
        raise AerieError(f"release {release}: no sglang package below lib/python3*/site-packages: run the sglang_patches role")
    reads = tokenizer is None or (tokenizer / "tokenizer.json").is_file()
    if chosen:
        return _chosen(chosen, python, None if reads else tokenizer)
    extensions = sorted(packages[0].glob("srt/rust_extensions/_bench*.so"))
    if extensions and reads:
        return _rust(python, extensions[0], version)
    for module, source in (("sglang.benchmark.serving", "benchmark/serving.py"), ("sglang.bench_serving", "bench_serving.py")):
        if (packages[0] / source).is_file():
            return Client(module, version, (str(python), "-m", module), sha256_file(packages[0] / source))
    raise AerieError(
        f"{packages[0]} ships no load client that Aerie knows (Rust, sglang.benchmark.serving, sglang.bench_serving): take another release"
    )


def _rust(python: Path, extension: Path, version: str) -> Client:
    return Client("sglang-rust", version, (str(python), "-I", "-c", RUST_LAUNCHER, str(extension)), sha256_file(extension))


def _chosen(extension: Path, python: Path, unreadable: Path | None) -> Client:
    cure = (
        "name the _bench*.so of an SGLang wheel for the release's Python in sglang_benchmark_client, or null for the release's own client"
    )
    if not extension.is_file():
        raise AerieError(f"the load client {extension} is not on this host: {cure}")
    if unreadable:
        raise AerieError(f"the load client {extension} reads tokenizer.json only, which {unreadable} lacks: {cure}")
    wanted = "".join(f"{python.resolve().name}".removeprefix("python").split("."))
    built = re.search(r"\.cpython-(\d+)", extension.name)
    if built and wanted.isdigit() and len(wanted) > 1 and built[1] != wanted:
        raise AerieError(f"the load client {extension} is built for CPython {built[1]}, and {python} is {wanted}: {cure}")
    return _rust(python, extension, "another release's")


def argv(client: Client, load: Load) -> list[str]:
    """Return the whole command line of one run.

    Both clients send temperature 0 and ignore the end-of-text token unless told otherwise, so every answer has the length
    that was asked for. They default to random lengths: the ratio 1.0 fixes them. Their own warm-up is off: the runner warms
    each shape itself, before the cache is flushed and the counters are read.
    """
    words = [*client.command, "--backend", "sglang", "--host", load.host, "--port", str(load.port)]
    if load.tokenizer:
        # else the client takes the name that the server goes by, which need not be a path
        words += ["--tokenizer", str(load.tokenizer)]
    workload = load.workload
    words += ["--dataset-name", str(workload["dataset"])]
    if load.dataset is not None:
        words += ["--dataset-path", str(load.dataset)]
    if workload["dataset"] == "sharegpt":
        words += ["--sharegpt-output-len", str(workload["output_len"])]
    else:
        words += ["--random-input-len", str(workload["input_len"]), "--random-output-len", str(workload["output_len"])]
        words += ["--random-range-ratio", "1.0"]
    words += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency), "--seed", str(load.seed)]
    words += ["--warmup-requests", "0", "--disable-tqdm", "--output-file", str(load.output)]
    return words


def read_result(path: Path) -> dict[str, Any]:
    """Return the last line of a client's output file; raise AerieError when there is none."""
    try:
        text = untrusted.read_bytes(path, untrusted.RAW).decode(errors="replace")
    except OSError as error:
        raise AerieError(f"the client wrote no result ({path.name}: {error.strerror})") from error
    try:
        result = untrusted.parse([line for line in text.splitlines() if line.strip()][-1], CLIENT_RESULT)
    except (IndexError, ValueError) as error:
        raise AerieError(f"the client's result can't be read ({path.name}: {error})") from error
    if not isinstance(result, dict):
        raise AerieError(f"the client's result is no object ({path.name})")
    return result


def metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a client's result in Aerie's names and units; what a client doesn't tell is null.

    With the native backend the clients take token counts from the server's own ``completion_tokens``, so their TPOT is
    (E2E − TTFT) / (tokens − 1) of real tokens; inter-token latency is of received chunks, several tokens each with speculation.
    """
    completed = int(_count(result, "completed") or 0)
    found: dict[str, Any] = {
        "completed": completed,
        "duration_s": _number(result, "duration"),
        "input_tokens": _count(result, "total_input_tokens"),
        "output_tokens": _count(result, "total_output_tokens"),
        "output_throughput_tok_s": _number(result, "output_throughput"),
        "input_throughput_tok_s": _number(result, "input_throughput"),
        "total_throughput_tok_s": _total(result),
        "request_throughput_req_s": _number(result, "request_throughput"),
        "concurrency_reached": _number(result, "concurrency"),
    }
    for name, key in LATENCIES.items():
        found[name] = {
            "mean": _number(result, f"mean_{key}"),
            "median": _number(result, f"median_{key}"),
            "std": _number(result, f"std_{key}"),
            "p99": _number(result, f"p99_{key}") if completed >= P99_REQUESTS else None,
        }
    return found


def _number(result: Mapping[str, Any], key: str) -> float | None:
    value = result.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _count(result: Mapping[str, Any], key: str) -> float | int | None:
    """Return a number of tokens or requests as the client wrote it."""
    return result[key] if _number(result, key) is not None else None


def _total(result: Mapping[str, Any]) -> float | None:
    total = _number(result, "total_throughput")
    parts = _number(result, "input_throughput"), _number(result, "output_throughput")
    return total if total is not None or None in parts else sum(part for part in parts if part is not None)
