"""What a torch trace of decode steps says: GPU time by kind of kernel and by phase, gaps, the host's calls. Standard library only.

Reads the events that torch.profiler (kineto) writes, as SGLang's ``/start_profile`` leaves them: ``kernel``, ``gpu_memcpy`` and
``gpu_memset`` on the GPU's timeline, ``cuda_runtime``, ``cuda_driver``, ``cpu_op`` and ``user_annotation`` on the host's. A step
begins where SGLang's own annotation ``step[VERIFY …]``, ``step[TARGET_VERIFY …]`` or, without speculation, ``step[DECODE …]`` begins.
GPU work belongs to the step and the phase in which the host launched it (kineto's correlation id), since the GPU runs behind.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError

# The first category whose pattern is found in a kernel's name, or in an operator's in a trace without a GPU, has it. Names as seen in
# FlashInfer 0.6, Triton 3.6, cuBLAS 13 (nvjet), CUTLASS, NCCL 2.28 and sgl-kernel; order matters: "moe" before "gemm", and so on.
CATEGORIES: tuple[tuple[str, str], ...] = (
    # ncclDevKernel_AllReduce_Sum_bf16_RING_LL, sglang::cross_device_reduce_1stage, flashinfer::trtllm_allreduce_fusion::...
    (
        "communication",
        r"nccl|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|nvshmem|mscclpp|deep_?ep|quick_reduce",
    ),
    # topkGatingSoftmax, moe_align_block_size_kernel, moe_sum_reduce, fused_moe_router, grouped_topk, expandInputRowsKernel
    (
        "moe routing",
        r"topk_?gating|moe_(align|sum|fused_gate|router)|fused_(topk|moe_router)|(grouped|biased)_topk|topk_softmax|topk_sigmoid"
        r"|expert_(tokens|offset)|expand_?input_?rows|finalize_?moe|permute_?(rows|tokens)|count_and_sort_expert|ep_scatter|ep_gather",
    ),
    # fused_moe_kernel, cutlass::device_kernel<...GroupProblemShape...>, bmm_E2m1_..., moe_wna16_marlin_gemm
    ("gemm, moe", r"fused_(marlin_)?moe|moe_?gemm|group(ed)?_?(gemm|problem)|MoeFC|moe_wna16|\bbmm_\w*(Fp8|E2m1|E4m3|Bfloat16)|marlin_moe"),
    # create_flashinfer_kv_indices_triton, store_kvcache, assign_req_to_token_pool, segment_packbits, get_last_loc_kernel
    (
        "kv and metadata",
        r"kv_?indices|kv_?indptr|store_kv|set_kv_buffer|reshape_and_cache|req_to_token|req_pool|cache_locs?|last_loc|move_kv|pack_?bits"
        r"|custom_mask|seqlens_expand|extend_after_decode|mrope_position|compute_position|gather_spec|future_?(map|token)",
    ),
    # flashinfer::BatchPrefillWithPagedKVCacheKernel, _fwd_grouped_kernel_stage1, flash::FlashAttnFwdSm90, fmhaSm100, aten::scaled_dot_...
    (
        "attention",
        r"Batch(Prefill|Decode|MLA)|(Single)?(Prefill|Decode)With|merge_?states?|\b_fwd_(grouped_)?kernel|_fwd_kernel_(stage|unified)"
        r"|extend_attention|decode_attention|flash_?(attn|fwd|mla)|\bflash::|fmha|attn|attention|\bmla_|persistent_?attention",
    ),
    # argmax, softmax, sort and top-k over the vocabulary; the tree of speculation
    (
        "sampling and tree",
        r"arg_?max|ArgMax|sampling|multinomial|softmax|top_?k|top_?p|min_?p|radix_?sort|RadixSort|bitonic|gatherTopK|mbtopk|radixFindKth|aten::sort"
        r"|build_(dynamic_)?tree|verify_?tree|tree_greedy|TreeSpec|penalt|logit|cumsum|exponential|accept_?(index|len|token)|fill_(new_)?(bonus|verified|accept)",
    ),
    # FusedAddRMSNormKernel, BatchQKApplyRotary..., act_and_mul_kernel, per_token_group_quant_8bit_kernel
    ("norm, rope, activation", r"rms_?norm|layer_?norm|\bnorm_?kernel|native_norm|rotary|rope|act_and_mul|silu|gelu|swiglu|quant|hadamard"),
    # nvjet_tst_128x64_..., sm90_xmma_gemm_bf16..., cutlass::Kernel2<cutlass_80_tensorop...>, cublasLt splitKreduce, gemvNSP, aten::mm
    (
        "gemm, dense",
        r"gemm|nvjet|cublas|cutlass|gemv|splitK|xmma|wgmma|s16816|tensorop|matmul|w8a8|dot_kernel|_mm_|aten::(mm|addmm|bmm|linear|baddbmm|mv)\b"
        r"|mkldnn|weight_packed_linear|onednn",
    ),
    # at::native::vectorized_elementwise_kernel, CatArrayBatchedCopy, index_elementwise_kernel, triton_poi_fused_...
    (
        "elementwise",
        r"elementwise|vectorized|at::native|triton_(poi|red|per|tem)|CatArray|index|scatter|gather|copy|fill|reduce|arange|embedding"
        r"|DeviceScan|DeviceReduce|DeviceSelect|cub::|thrust::|aten::|concat|unroll",
    ),
)
MEMCPY, MEMSET, OTHER, IDLE = "memcpy", "memset", "other", "idle"
NAMES = (*(name for name, _ in CATEGORIES), MEMCPY, MEMSET, OTHER, IDLE)
"""All categories in the order that tables and plots show them."""
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in CATEGORIES)

ON_GPU = {"kernel": None, "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}
RUNTIME = ("cuda_runtime", "cuda_driver")
PHASE = "aerie:"
OUTSIDE = "outside the marks"
STEP = re.compile(r"step\[(\w+)")
PREFILLS = ("EXTEND", "MIXED", "SPLIT_PREFILL")
VERIFIES = ("VERIFY", "TARGET_VERIFY")
SYNCHRONISES = re.compile(r"Synchronize|^cudaMemcpy$|^cuMemcpyDtoH(_v2)?$")
LAUNCHES = re.compile(r"Launch|Async|^cudaMemset")
READS_BACK = ("aten::item", "aten::_local_scalar_dense")
TOP = 15
LARGEST_BYTES = 400 << 20
"""A trace of more than this, unpacked, takes more memory to read than a busy host may have."""


@dataclass(frozen=True)
class Event:
    """One complete event of a trace; times are in microseconds."""

    name: str
    kind: str
    start: float
    duration: float
    thread: tuple[Any, Any]
    correlation: int | None

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Span:
    """Time of one device that one name has for itself; ``phase`` and ``step`` are those it was launched in."""

    name: str
    category: str
    microseconds: float
    step: int
    phase: str
    count: int = 1


def category(name: str, kind: str = "kernel") -> str:
    """Return the category of a kernel, copy or operator; ``other`` for a name that the table does not know."""
    if fixed := ON_GPU.get(kind):
        return fixed
    return next((found for found, pattern in _COMPILED if pattern.search(name)), OTHER)


def load(path: Path) -> list[Event]:
    """Return the events of a trace file, compressed or not; raise AerieError where it is none, or too large to read here."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as stream:
            data = stream.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            raise AerieError(f"{path} holds over {LARGEST_BYTES >> 20} MiB: trace fewer steps (sglang_profile_trace_steps)")
        return events(json.loads(data)["traceEvents"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise AerieError(f"{path} is no torch trace, or was cut off while it was written: {error}") from error


def events(raw: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the complete events (``ph`` X) of ``raw`` that the summary reads, in order of time, enclosing ones first."""
    wanted = {*ON_GPU, *RUNTIME, "cpu_op", "user_annotation"}
    found = [
        Event(
            name=str(event.get("name", "")),
            kind=str(event["cat"]),
            start=float(event["ts"]),
            duration=float(event.get("dur") or 0.0),
            thread=(event.get("pid"), event.get("tid")),
            correlation=(event.get("args") or {}).get("correlation"),
        )
        for event in raw
        if event.get("ph") == "X" and event.get("cat") in wanted
    ]
    return sorted(found, key=lambda event: (event.start, -event.duration))


def summarise(found: Sequence[Event]) -> dict[str, Any]:
    """Return milliseconds per decode step by category, by phase and by name, and what the host did; see docs/reference/profile.md.

    Steps between which a prefill ran are left out, unless none is left; so is the first, which bears the start of the tracing.
    """
    steps = _Steps.of(found)
    if not steps.chosen:
        raise AerieError("the trace holds no two decode steps: trace more steps, or while requests are running")
    gpu = [event for event in found if event.kind in ON_GPU]
    phases = _Phases([event for event in found if event.kind == "user_annotation" and event.name.startswith(PHASE)])
    spans = _gpu_spans(found, gpu, steps, phases) if gpu else _operator_spans(found, steps, phases)
    count = len(steps.chosen)
    total = sum(span.microseconds for span in spans)

    def part(members: Iterable[Span]) -> dict[str, float]:
        chosen = list(members)
        spent = sum(span.microseconds for span in chosen)
        calls = sum(span.count for span in chosen)
        return {"ms": _ms(spent, count), "share": spent / total if total else 0.0, "count": round(calls / count, 2)}

    by_category, by_phase, by_name = _grouped(spans)
    named: list[dict[str, Any]] = [
        {"name": name[:200], "category": kind, **part(members)} for (kind, name), members in by_name.items() if kind != IDLE
    ]
    named.sort(key=lambda entry: -float(entry["ms"]))
    return {
        "device": "gpu" if gpu else "cpu",
        "steps": count,
        "steps_seen": steps.seen,
        "without_prefill": steps.clean,
        "step_ms": _ms(total, count),
        "categories": {name: part(by_category[name]) for name in NAMES if name in by_category},
        "phases": {
            name: {**part(members), "categories": {kind: part(inner)["ms"] for kind, inner in _grouped(members)[0].items()}}
            for name, members in by_phase.items()
        }
        if phases
        else {},
        "kernels": named[:TOP],
        "unknown": [entry for entry in named if entry["category"] == OTHER],
        "host": _host(found, steps, phases),
    }


def _grouped(spans: Iterable[Span]) -> tuple[dict[str, list[Span]], dict[str, list[Span]], dict[tuple[str, str], list[Span]]]:
    by_category: dict[str, list[Span]] = defaultdict(list)
    by_phase: dict[str, list[Span]] = defaultdict(list)
    by_name: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_category[span.category].append(span)
        by_phase[span.phase].append(span)
        by_name[span.category, span.name].append(span)
    return by_category, by_phase, by_name


# ---- steps and phases --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Steps:
    """Where steps begin on the host, its thread there, and which steps count."""

    starts: tuple[float, ...]
    thread: tuple[Any, Any]
    chosen: frozenset[int]
    seen: int
    clean: bool

    @classmethod
    def of(cls, found: Sequence[Event]) -> _Steps:
        spans = [(match[1], event) for event in found if event.kind == "user_annotation" and (match := STEP.match(event.name))]
        verifies = any(mode in VERIFIES for mode, _ in spans)
        main = [event for mode, event in spans if (mode in VERIFIES if verifies else mode == "DECODE")]
        if not main:
            raise AerieError(
                "the trace has no annotation of a decode step (step[DECODE …] or step[VERIFY …]): did decode steps run while it was taken?"
            )
        starts = [event.start for event in main]
        prefills = sorted(event.start for mode, event in spans if mode in PREFILLS)
        whole = range(1 if len(starts) > 3 else 0, len(starts) - 1)
        clean = [step for step in whole if bisect.bisect(prefills, starts[step]) == bisect.bisect(prefills, starts[step + 1])]
        return cls(tuple(starts), main[0].thread, frozenset(clean or whole), len(starts), bool(clean))

    def at(self, time: float) -> int:
        """Return the step in which ``time`` lies; -1 before the first."""
        return bisect.bisect_right(self.starts, time) - 1


class _Phases:
    """The ranges that the patch set ``phase_profiler`` marks; they don't overlap."""

    def __init__(self, ranges: Sequence[Event]) -> None:
        self._ranges = ranges
        self._starts = [event.start for event in ranges]

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def at(self, time: float) -> str:
        position = bisect.bisect_right(self._starts, time) - 1
        if position < 0 or time >= self._ranges[position].end:
            return OUTSIDE
        return self._ranges[position].name.removeprefix(PHASE)


# ---- devices -----------------------------------------------------------------------------------------------------------------------


def _gpu_spans(found: Sequence[Event], gpu: Sequence[Event], steps: _Steps, phases: _Phases) -> list[Span]:
    """Return the GPU's time from the first work of each step to that of the next: every moment is one event's, or idle.

    Where events overlap, the moment is that of the one that began first. Idle time belongs to the phase that the GPU waited for.
    """
    launched = {event.correlation: event.start for event in found if event.kind in RUNTIME and event.correlation is not None}
    spans: list[Span] = []
    cursor = gpu[0].start
    step = -1
    for event in gpu:
        launch = event.start if event.correlation is None else launched.get(event.correlation, event.start)
        phase = phases.at(launch)
        if event.start > cursor and step in steps.chosen:
            spans.append(Span("", IDLE, event.start - cursor, step, phase))
        # Work of another stream may have been launched earlier than what began before it.
        step = max(step, steps.at(launch))
        if step in steps.chosen:
            alone = max(0.0, event.end - max(cursor, event.start))
            spans.append(Span(event.name, category(event.name, event.kind), alone, step, phase))
        cursor = max(cursor, event.end)
    return spans


def _operator_spans(found: Sequence[Event], steps: _Steps, phases: _Phases) -> list[Span]:
    """Return the host's time of each step by its innermost operator; time outside of operators is idle. For traces without a GPU."""
    operators = [event for event in found if event.kind == "cpu_op" and event.thread == steps.thread]
    spans: list[Span] = []
    inside: dict[int, float] = defaultdict(float)
    for event, alone in _exclusive(operators):
        step = steps.at(event.start)
        if step in steps.chosen:
            spans.append(Span(event.name, category(event.name), alone, step, phases.at(event.start)))
            inside[step] += alone
    for step in sorted(steps.chosen):
        idle = steps.starts[step + 1] - steps.starts[step] - inside[step]
        spans.append(Span("", IDLE, max(0.0, idle), step, OUTSIDE))
    return spans


def _exclusive(nested: Sequence[Event]) -> list[tuple[Event, float]]:
    """Return each event with its duration less that of the events directly inside it."""
    inner = [0.0] * len(nested)
    stack: list[int] = []
    for position, event in enumerate(nested):
        while stack and nested[stack[-1]].end <= event.start:
            stack.pop()
        if stack:
            inner[stack[-1]] += event.duration
        stack.append(position)
    return [(event, max(0.0, event.duration - inside)) for event, inside in zip(nested, inner, strict=True)]


# ---- the host ----------------------------------------------------------------------------------------------------------------------


def _host(found: Sequence[Event], steps: _Steps, phases: _Phases) -> dict[str, Any]:
    """Return, per step, what the scheduler's thread spent in launches and in waits, where it waited, and the rest."""
    count = len(steps.chosen)
    calls: dict[str, list[float]] = defaultdict(list)
    sites: dict[tuple[str, str], list[float]] = defaultdict(list)
    reads: list[float] = []
    stack: list[Event] = []
    for event in found:
        if event.thread != steps.thread or event.kind in ON_GPU:
            continue
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if steps.at(event.start) in steps.chosen:
            if event.kind in RUNTIME:
                calls[event.name].append(event.duration)
                if SYNCHRONISES.search(event.name):
                    sites[_site(stack, phases.at(event.start)), event.name].append(event.duration)
            elif event.name in READS_BACK and not any(outer.name in READS_BACK for outer in stack):
                reads.append(event.duration)
        stack.append(event)
    waits = {name: times for name, times in calls.items() if SYNCHRONISES.search(name)}
    launches = {name: times for name, times in calls.items() if name not in waits and LAUNCHES.search(name)}
    span = sum(steps.starts[step + 1] - steps.starts[step] for step in steps.chosen)
    spent = sum(map(sum, waits.values())), sum(map(sum, launches.values()))
    copies = sum(event.kind == "gpu_memcpy" and "DtoH" in event.name and steps.at(event.start) in steps.chosen for event in found)
    return {
        "step_ms": _ms(span, count),
        "sync_ms": _ms(spent[0], count),
        "syncs": round(sum(map(len, waits.values())) / count, 2),
        "launch_ms": _ms(spent[1], count),
        "launches": round(sum(map(len, launches.values())) / count, 2),
        "other_ms": _ms(span - sum(spent), count),
        "items": round(len(reads) / count, 2),
        "item_ms": _ms(sum(reads), count),
        "copies_to_host": round(copies / count, 2),
        "calls": _listed([{"name": name} for name in calls], list(calls.values()), count),
        "sync_sites": _listed([{"where": where, "name": name} for where, name in sites], list(sites.values()), count),
    }


def _site(stack: Sequence[Event], phase: str) -> str:
    """Return where a call was made: its phase, the annotation around it and the innermost operator, as far as there are any."""
    annotations = [event.name for event in stack if event.kind == "user_annotation" and not event.name.startswith(PHASE)]
    operators = [event.name for event in stack if event.kind == "cpu_op"]
    return " > ".join([phase] * (phase != OUTSIDE) + annotations[-1:] + operators[-1:]) or "outside all annotations"


def _listed(names: Sequence[Mapping[str, str]], times: Sequence[Sequence[float]], count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {**name, "count": round(len(each) / count, 2), "ms": _ms(sum(each), count)} for name, each in zip(names, times, strict=True)
    ]
    return sorted(rows, key=lambda row: -float(row["ms"]))[:TOP]


def _ms(microseconds: float, steps: int) -> float:
    return round(microseconds / 1000 / steps, 6)
