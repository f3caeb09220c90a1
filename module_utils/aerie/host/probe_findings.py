"""What a probe's processes told, in words and figures. Pure; standard library only: this runs on hosts.

The numbers of causes are those of ``preflight/pains.yml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ansible.module_utils.aerie.host.probe_runner import Ended, Outcome
from ansible.module_utils.aerie.words import listing

BUSY_PERCENT = 50
HELD_MIB = 512
"""A wedged GPU was seen to hold 624 MiB with no process; an idle driver holds a few."""

FIRST_COLLECTIVE = "the IOMMU or ACS can do this although `nvidia-smi topo -p2p r` says OK; it works with NCCL_P2P_DISABLE=1 if it is that"
ONE_SHOT = "GPUs that meet only at the host bridge (PHB) do this: start servers with disable-custom-all-reduce"
HANGS = {
    "first all_reduce": FIRST_COLLECTIVE,
    "take the device": "the GPU does not answer: see the wedge check",
    "capture an all_reduce in a CUDA graph": "graph capture hangs: start servers with disable-cuda-graph until the cause is found",
    "capture SGLang's all_reduce": ONE_SHOT,
    "replay SGLang's all_reduce": ONE_SHOT,
    "SGLang's all_reduce": ONE_SHOT,
    "replay the CUDA graph": "a captured collective hangs: start servers with disable-cuda-graph until the cause is found",
}


@dataclass(frozen=True)
class Cause:
    """Why a library of the release does not work, and what to do."""

    pain: int | None
    cause: str
    cure: str
    library: str | None = None
    symbol: str | None = None


def diagnose(library: str, error: str, loaded: Sequence[str] = ()) -> Cause | None:
    """Return the known cause of an error at import or in a kernel, None where it is none that we know."""
    lacking = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file", error)
    symbol = re.search(r"undefined symbol: (\w+)", error)
    cuda_12 = re.search(r"lib(?:nvrtc|cudart|cublas\w*)\.so\.(?:11\.0|12)", error)
    if library == "kernel" and ((cuda_12 and lacking) or ("Could not load any common_ops" in error and not symbol)):
        return Cause(
            9,
            "the kernel package was built for another CUDA than torch was, so that a library it needs is not there",
            "install the kernel package's wheel for torch's CUDA (cu130 with CUDA 13): make the release anew from its lock",
            library=lacking.group(1) if lacking else cuda_12.group(0) if cuda_12 else None,
        )
    if symbol:
        return Cause(
            10,
            "it was built for another torch: the symbol is not in this one",
            "install the wheel that was built for this torch and CUDA: make the release anew from its lock, which pins them together",
            symbol=symbol.group(1),
        )
    if library == "flashinfer" and (cuda_12 or len(runtimes(loaded)) > 1):
        stray = [path for path in loaded if "libcudart" in path]
        return Cause(
            11,
            f"more than one CUDA runtime is on the loader's path ({listing(stray) if stray else cuda_12.group(0) if cuda_12 else '?'})",
            "take the stray libcudart.so off LD_LIBRARY_PATH and /etc/ld.so.conf.d, then run ldconfig",
            library=cuda_12.group(0) if cuda_12 else None,
        )
    if "No supported CUDA architectures" in error:
        return Cause(12, "nvcc is older than 12.9 and does not know this GPU", "install CUDA toolkit 13 and let CUDA_HOME point to it")
    if "ptxas" in error and re.search(r"sm_\d+|not defined for option|fatal", error):
        return Cause(13, "the ptxas that Triton uses does not know this GPU", "set TRITON_PTXAS_PATH to the ptxas of CUDA toolkit 13")
    if "no kernel image is available" in error:
        return Cause(None, "it has no kernels for this GPU's architecture", "install a build for this GPU's compute capability")
    if lacking:
        return Cause(
            None, "a shared library is not on the loader's path", "install what has it, or make the release anew", library=lacking.group(1)
        )
    if missing := re.search(r"No module named '([\w.]+)'", error):
        return Cause(
            None, f"Python's module {missing.group(1)} is not installed", "make the release anew from its lock", library=missing.group(1)
        )
    return None


def runtimes(loaded: Sequence[str]) -> set[str]:
    """Return the major versions of the CUDA runtimes among loaded libraries."""
    return {found.group(1) for path in loaded if (found := re.search(r"libcudart\.so\.(\d+)", path))}


def hang(outcome: Outcome) -> dict[str, Any] | None:
    """Return who came least far before the time was over, where that was and in which calls; None where nothing hung."""
    stopped = [part for part in outcome.parts if part.status is None]
    if not outcome.timed_out or not stopped:
        return None
    least = min(len(part.stages) for part in stopped)
    behind = [part for part in stopped if len(part.stages) == least]
    return {
        "who": [part.name for part in behind],
        "all": len(behind) == len(outcome.parts),
        "stage": behind[0].stage,
        "where": list(behind[0].where),
        "others": {part.name: part.stage for part in outcome.parts if part not in behind},
    }


def status(outcome: Outcome) -> str:
    """Return a probe's status word."""
    return "timeout" if outcome.timed_out else "passed" if outcome.passed else "failed"


def reason(outcome: Outcome, seconds: float) -> str | None:
    """Return why a probe did not pass, with who and where, None where it did."""
    told = None
    if stopped := hang(outcome):
        who = "all of them" if stopped["all"] and len(outcome.parts) > 1 else listing(stopped["who"])
        calls = f", in {' < '.join(stopped['where'])}" if stopped["where"] else ""
        others = [f"{name} waited in '{stage}'" for name, stage in stopped["others"].items()]
        advice = next((words for begin, words in HANGS.items() if str(stopped["stage"]).startswith(begin)), None)
        told = f"no end within {seconds:g} s: {who} stopped at '{stopped['stage']}'{calls}"
        told += f"; {listing(others)}" if others else ""
        told += f": {advice}" if advice and stopped["all"] else ""
    elif failed := sorted((part for part in outcome.parts if not part.passed and part.status is not None), key=_first):
        first = failed[0]
        if first.signal:
            told = f"{first.name} was killed by {first.signal} at '{first.stage}'"
            told += f", in {' < '.join(first.where)}" if first.where else ""
        elif first.problems:
            alike = [part.name for part in failed if part.problems and not part.signal]
            together = all(part.status == 0 for part in failed)
            told = f"{listing(alike if together else [first.name])} at '{first.stage}': {first.problems[0]['message']}"
        else:
            words = first.log.strip().splitlines()
            told = f"{first.name} ended with exit status {first.status} at '{first.stage}': {words[-1] if words else 'it said nothing'}"
    if outcome.left:
        told = f"{told or 'it ended'}; {undying(outcome)}"
    return told


def undying(outcome: Outcome) -> str:
    """Return what to say of processes that wait inside the driver for ever."""
    return f"SIGKILL does not end process {listing(outcome.left)}: it waits inside the driver, and only a reboot frees it"


def _first(part: Ended) -> tuple[bool, int]:
    return part.signal is None, part.order


def all_reduce_run(outcome: Outcome, ranks: int, seconds: float) -> dict[str, Any]:
    """Return one run of the all_reduce: rank 0's figures, and what is wrong on whichever rank."""
    first = outcome.parts[0]
    wrong = [
        {"rank": number, **{key: problem[key] for key in ("bytes", "got", "known", "own", "message")}}
        for number, part in enumerate(outcome.parts)
        for problem in part.problems
        if "known" in problem
    ]
    return {
        "ranks": ranks,
        "status": status(outcome),
        "reason": reason(outcome, seconds),
        "seconds": round(outcome.seconds, 1),
        "first_seconds": first.last("first_seconds"),
        "sizes": first.all("size"),
        "graph": first.last("graph"),
        "wrong": wrong,
        "hang": hang(outcome),
    }


def custom_run(outcome: Outcome, ranks: int, seconds: float) -> dict[str, Any]:
    """Return one run of SGLang's own all_reduce; ``untried`` says why it did not sum."""
    whole = all_reduce_run(outcome, ranks, seconds)
    kept = {name: whole[name] for name in ("ranks", "status", "reason", "seconds", "sizes", "wrong", "hang")}
    return kept | {name: outcome.parts[0].last(name) for name in ("kind", "untried")}


def kernels(outcome: Outcome, seconds: float, required: bool) -> tuple[str, str | None, dict[str, Any]]:
    """Return status, reason and figures of the kernels probe; ``required``: a library that is not there is a failure."""
    libraries: dict[str, Any] = {}
    told = []
    for part in outcome.parts:
        module = part.last("module")
        one: dict[str, Any] = {"module": module, "version": part.last("version"), "kernel": part.last("kernel")}
        one["gpus"] = [found["gpu"] for found in part.all("error")]
        one["loaded"] = part.last("libraries") or []
        why = reason(Outcome((part,), outcome.seconds, outcome.timed_out and part.status is None, ()), seconds)
        if part.passed and module is None:
            one |= {"status": "absent", "reason": "it is not installed" if required else None}
            told += [f"{part.name} is not installed"] if required else []
        elif part.passed:
            one |= {"status": "passed", "reason": None}
        else:
            known = diagnose(part.name, " ".join(problem["message"] for problem in part.problems) or part.log, one["loaded"])
            one |= {"status": "timeout" if part.status is None else "failed", "reason": why, "stage": part.stage}
            one |= asdict(known) if known else {}
            told.append(f"{why}{f': {known.cause}: {known.cure}' if known else ''}")
        libraries[part.name] = one
    torch = next((part.last("torch") for part in outcome.parts if part.last("torch")), None)
    broken = next((one for name, one in libraries.items() if name == "torch" and one["status"] != "passed"), None)
    if broken is not None:  # the others need it and only say so again
        told = told[:1]
    word = "timeout" if outcome.timed_out else "failed" if told else "passed"
    return word, "; ".join(told) or None, {"libraries": libraries, "torch": torch}


def p2p(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of each pair, by "0-1"."""
    part = outcome.parts[0]
    pairs: dict[str, Any] = {}
    for pair in part.all("pair"):
        where = pair["pair"]
        pairs[where] = {key: value for key, value in pair.items() if key != "pair"} | {"verified": pair["wrong"] == 0}
    for latency in part.all("load_latency"):
        if latency["pair"] in pairs:
            pairs[latency["pair"]] |= {
                "load_latency_us": latency.get("us"),
                "own_load_latency_us": latency.get("own_us"),
                "load_latency_reason": latency.get("reason"),
            }
    return {"pairs": pairs}


def link(outcome: Outcome, samples: Sequence[tuple[str, Mapping[int, Mapping[str, int | None]]]]) -> dict[str, Any]:
    """Return each GPU's link as it was while data moved over it, and its bandwidths."""
    gpus: dict[str, Any] = {}
    for found in outcome.parts[0].all("gpu"):
        number = int(found["gpu"])
        seen = [rows[number] for stage, rows in samples if number in rows and f"GPU {number}" in stage and stage.startswith("copy")]
        under_load: dict[str, Any] = {"samples": len(seen)}
        for name in ("generation", "width"):
            values = [value for row in seen if (value := row[name]) is not None]
            best = [value for row in seen if (value := row[f"{name}_max"]) is not None]
            # The link trains up within the first copies; what it then falls to is told beside the best.
            under_load |= {
                name: max(values, default=None),
                f"{name}_min": min(values, default=None),
                f"{name}_max": max(best, default=None),
            }
        gpus[str(number)] = under_load | {key: found[key] for key in ("h2d_gb_s", "d2h_gb_s", "wrong")}
    return {"gpus": gpus}


def wedged(
    part: Ended | None, timed_out: bool, gpu: Mapping[str, Any] | None, processes: Sequence[Mapping[str, Any]], number: int
) -> dict[str, Any]:
    """Return whether GPU ``number`` works: what nvidia-smi says of it at rest (``gpu``), who uses it, and what its process gave."""
    reset = (
        f"end what uses it and reset it (nvidia-smi --gpu-reset -i {number}); where that is refused, and for GPUs with NVLink or in a "
        "virtual machine, reboot"
    )
    found: dict[str, Any] = {
        "utilization_percent": gpu["utilization_percent"] if gpu else None,
        "power_w": gpu["power_w"] if gpu else None,
        "memory_used_mib": gpu["memory_used_mib"] if gpu else None,
        "processes": [dict(one) for one in processes],
        "seconds": part.last("seconds") if part else None,
    }
    numbers = f"{found['utilization_percent']} % utilisation, {found['power_w']} W, {found['memory_used_mib']} MiB used"
    busy = (found["utilization_percent"] or 0) >= BUSY_PERCENT and not processes
    if gpu is None:
        return found | {
            "state": "lost",
            "reason": f"GPU {number} is gone from nvidia-smi: look for Xid 79 in the kernel log, check seating and power, and reboot",
        }
    if part is not None and timed_out and part.status is None:
        return found | {"state": "wedged", "reason": f"GPU {number} is wedged: it stopped at '{part.stage}' ({numbers}): {reset}"}
    if part is not None and not part.passed:
        why = part.problems[0]["message"] if part.problems else part.signal or f"exit status {part.status}"
        return found | {"state": "failed", "reason": f"GPU {number} failed at '{part.stage}': {why} ({numbers})"}
    if busy:
        return found | {"state": "wedged", "reason": f"GPU {number} is wedged: {numbers}, and no process uses it: {reset}"}
    note = None
    if (found["memory_used_mib"] or 0) > HELD_MIB and not processes:
        note = f"GPU {number} holds {found['memory_used_mib']} MiB with no visible process: another container's, or a dead one's"
    return found | {"state": "healthy", "reason": note}
