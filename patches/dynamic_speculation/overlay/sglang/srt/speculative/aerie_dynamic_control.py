"""What steers dynamic speculation from outside: server argument, ``/set_internal_state``, and state, metrics and log for people.

Hooks in the server call the module's functions, which do nothing while no :class:`Control` was started. A scheduler process starts one at
most (:func:`start`, by the worker), and its worker asks :meth:`Control.decide` once for each decode step.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sglang.srt.speculative import aerie_dynamic_policy
from sglang.srt.speculative.aerie_dynamic_policy import PLAIN, SPECULATIVE, Policy, Settings

logger = logging.getLogger(__name__)

ARGUMENT = "speculative_dynamic_disable_threshold"
FLAG = "--speculative-dynamic-disable-threshold"
CALIBRATION = "AERIE_DYNAMIC_CALIBRATION"
MORE_SETTINGS = "AERIE_DYNAMIC_SETTINGS"
AUTO = "auto"
STATE = "speculative_dynamic"
MAX_RUNNING_REQUESTS = 48  # what SGLang takes with speculation when nothing is said: arg_groups/speculative_hook.py
HELP = (
    "Decode plainly, without speculation, while more than this many requests run; 0 never speculates, auto takes what the calibration file "
    f"says that the environment variable {CALIBRATION} names, unset always speculates."
)
LOG_SECONDS = 1.0
FEW = 1e-9  # requests
ALLOCATED, COMMITTED = "kv_allocated_len", "kv_committed_len"
_ELSEWHERE = "was not tried with a cache, but the hierarchical one, that copies K/V elsewhere"
_EXCHANGES = "was not tried where ranks exchange their numbers of tokens in each step"
REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("dcp_size", 1, "was not tried with context parallelism"),
    ("attn_cp_size", 1, "was not tried with context parallelism"),
    ("moe_a2a_backend", "none", _EXCHANGES),
    ("moe_dense_tp_size", None, _EXCHANGES),
    (
        "enable_deterministic_inference",
        False,
        "draws from a seed in two ways, by load, so that its tokens are not reproducible",
    ),
    ("enable_unified_memory", False, "was not tried with a KV pool of virtual slots"),
    ("enable_hisparse", False, "was not tried with hierarchical sparse attention"),
    ("speculative_draft_window_size", None, "was not tried with a draft that attends to a window"),
    ("enable_lmcache", False, _ELSEWHERE),
    ("enable_flexkv", False, _ELSEWHERE),
    ("enable_unified_cache_external_linker", False, _ELSEWHERE),
    ("radix_cache_backend", None, "was not tried with a prefix cache that is not SGLang's own"),
)
"""Arguments that must have their default, which this is, and why. Not all versions have all."""

_control: Control | None = None
_collector: Any = None
_is_wanted = False  # in this process, which need not be the scheduler's


# The server argument


def resolved(server_args: Any) -> Any:
    """Return the arguments as SGLang completed them: from 0.5.19 beside what was given, before in its place."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def threshold(server_args: Any) -> int | str | None:
    """Return the argument: a number of requests, ``auto``, or None where dynamic speculation is off. Raise ValueError for anything else."""
    value = getattr(server_args, ARGUMENT, None)
    if value is None:
        return None
    text = str(value).strip()
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise ValueError(f"{FLAG} must be a number of requests, 0 or more, or auto (is {value})")
    return int(text)


def settings(server_args: Any) -> Settings | None:
    """Return what the argument and the files and variables that go with it say; None where dynamic speculation is off."""
    wanted = threshold(server_args)
    if wanted is None:
        return None
    found = _calibrated() if wanted == AUTO else Settings.of_threshold(int(wanted))
    more = os.environ.get(MORE_SETTINGS)
    if not more:
        return found
    try:
        changes = json.loads(more)
        if not isinstance(changes, dict):
            raise ValueError("must be a JSON object")
        return found.changed(changes)
    except ValueError as error:
        raise ValueError(f"{MORE_SETTINGS}: {error}: correct it, or leave it out") from error


def _calibrated() -> Settings:
    path = os.environ.get(CALIBRATION)
    if not path:
        raise ValueError(f"{FLAG} auto needs a calibration: name its file in the environment variable {CALIBRATION}, or give a number")
    try:
        return Settings.of_calibration(json.loads(pathlib.Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{FLAG} auto: calibration {path}: {error}: calibrate again, or give a number") from error


def problems(args: Any) -> Iterator[str]:
    """Yield why dynamic speculation can't be had with the server's arguments, with the cure.

    The launch checks on hosts say the same before a server is started.
    """

    def get(name: str, default: Any = None) -> Any:
        value = getattr(args, name, None)
        return default if value is None else value

    algorithm = str(get("speculative_algorithm", "")).upper()
    if not algorithm:
        yield f"{FLAG} needs speculation: set --speculative-algorithm EAGLE3 and a draft, or leave it out"
    elif algorithm != "EAGLE3":
        yield f"{FLAG} is for EAGLE-3 drafts, which can catch up exactly: set --speculative-algorithm EAGLE3 (is {algorithm})"
    if int(get("speculative_eagle_topk", 1)) != 1:
        yield f"{FLAG} is for chains of drafted tokens, not for trees: set --speculative-eagle-topk 1 (is {get('speculative_eagle_topk')})"
    if get("enable_multi_layer_eagle", False):
        yield f"{FLAG}: the K/V of a multi-layer draft can't be written without running it: leave out --enable-multi-layer-eagle"
    if get("enable_dp_attention", False) or int(get("attn_dp_size", 1)) > 1:
        yield f"{FLAG}: with DP attention each rank has its own batches, and would decide alone: leave out --enable-dp-attention"
    if int(get("pp_size", 1)) > 1:
        yield f"{FLAG} is not for pipeline parallelism: set --pp-size 1, and --tp-size instead (is {get('pp_size')})"
    if get("enable_lora", False) or get("lora_paths"):
        yield f"{FLAG} was not tried with LoRA: leave out --enable-lora and --lora-paths"
    yield from _adaptive_problems(args)
    if get("enable_two_batch_overlap", False):
        yield f"{FLAG} was not tried with two batches overlapped: leave out --enable-two-batch-overlap"
    if str(get("disaggregation_mode", "null")) != "null" or get("enable_pdmux", False):
        yield f"{FLAG} was not tried with prefill and decode apart: leave out --disaggregation-mode and --enable-pdmux"
    for name, default, why in REFUSED:
        value = get(name, default)
        if value != default:
            yield f"{FLAG} {why}: leave out --{name.replace('_', '-')} (is {value})"
    try:
        wanted = threshold(args)
        settings(args)
    except ValueError as error:
        yield str(error)
        return
    most = int(get("max_running_requests", MAX_RUNNING_REQUESTS))
    if isinstance(wanted, int) and wanted >= most:
        yield (
            f"{FLAG} {wanted} never decodes plainly, since no more than {most} requests run at once: set --max-running-requests above "
            f"{wanted} (without it {MAX_RUNNING_REQUESTS} with speculation), or a lower threshold"
        )


def _adaptive_problems(args: Any) -> Iterator[str]:
    """Yield why SGLang's adaptive speculation can't choose the depth beside dynamic speculation.

    Its step 0 verifies one token where dynamic speculation decodes, and its own table has step 0.
    """
    if not getattr(args, "speculative_adaptive", False):
        return
    path = getattr(args, "speculative_adaptive_config", None)
    if not path:
        yield (
            f"{FLAG} decodes without speculation by itself, and SGLang's own table of --speculative-adaptive has "
            "step 0: name a file without it in --speculative-adaptive-config"
        )
        return
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    try:
        candidates = resolve_candidate_steps_from_config(cfg_path=path)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        yield f"--speculative-adaptive-config {path}: {error}: correct the file"
        return
    if 0 in candidates:
        yield (
            f"--speculative-adaptive-config {path} has step 0, which {FLAG} is for: leave it out of candidate_steps "
            f"(there are {', '.join(map(str, candidates))})"
        )


def check_server_args(server_args: Any) -> None:
    """Refuse arguments that dynamic speculation can't be had with, before anything is loaded; all reasons at once."""
    global _is_wanted
    args = resolved(server_args)
    if getattr(args, ARGUMENT, None) is None:
        return
    found = list(problems(args))
    if found:
        raise ValueError("\n".join(found))
    _is_wanted = True


# The scheduler process


class Control:
    """One process's policy, with what is said about it. Only rank 0 says anything."""

    def __init__(self, policy: Policy, rank: int = 0, ranks: int = 1) -> None:
        self.policy = policy
        self.rank = rank
        self.ranks = ranks
        self.candidate_steps: tuple[int, ...] = ()
        """The depths that adaptive speculation can choose from; empty where the depth is fixed."""
        self.refused: str | None = None
        self.metrics: Metrics | None = None
        self._untold = 0
        self._next_log = 0.0
        self._last_result: float | None = None
        self._last_kind: str | None = None
        self.is_plain_result = False

    # Each step

    def decide(self, batch_size: int) -> bool:
        """Say whether the step to be made decodes plainly; ``batch_size`` is after CUDA-graph padding. Once a step, on every rank."""
        policy = self.policy
        if policy.settings.adapt and policy.plan_is_due():
            self._agree()
        was = policy.plain
        plain = policy.decide(batch_size, time.time())
        if self.metrics is not None:
            self.metrics.stepped(plain)
        if plain != was:
            self._untold += 1
            if self.metrics is not None:
                self.metrics.switched(policy)
        if self._untold:
            self._tell(batch_size)
        return plain

    def _agree(self) -> None:
        plan = self.policy.plan() if self.rank == 0 else None
        if self.ranks > 1:
            from sglang.srt.distributed import get_tp_group

            plan = get_tp_group().broadcast_object(plan, 0)
        before = self.policy.settings
        self.policy.apply(plan)
        after = self.policy.settings
        if (before.high, before.low) != (after.high, after.low):
            self._changed(f"measured: above {after.high} (was {before.high}) plain, at {after.low} (was {before.low}) speculative")

    def _tell(self, batch_size: int) -> None:
        now = time.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + LOG_SECONDS
        policy, untold, self._untold = self.policy, self._untold, 0
        if self.rank == 0:
            logger.info(
                "Dynamic speculation: %s (%s) at %d requests; high %d, low %d, switches %d (%d since the last line)",
                "plain decode" if policy.plain else "speculation",
                policy.reason,
                batch_size,
                policy.settings.high,
                policy.settings.low,
                sum(policy.switches.values()),
                untold,
            )

    def _changed(self, what: str) -> None:
        if self.rank == 0:
            logger.info("Dynamic speculation: %s", what)
        if self.metrics is not None:
            self.metrics.set(self.policy)

    # Finished steps, whose numbers are on the host anyway

    def observe(self, kind: str, batch_size: int, seconds: float, tokens: int) -> None:
        """Take in a finished step: what it took, 0 where that isn't known, and the tokens that it gave."""
        self.policy.observe(kind, batch_size, seconds, tokens)

    def result_begins(self, result: Any) -> None:
        """A decode's result is about to be read."""
        self.is_plain_result = getattr(result, "speculative_num_draft_tokens", None) == 1

    def result_read(self, batch: Any, result: Any) -> None:
        """A decode's result was read: measure the step."""
        kind = PLAIN if self.is_plain_result else SPECULATIVE
        now = time.perf_counter()
        if self._last_result is not None and self._last_kind == kind:
            size = len(batch.reqs)
            self.observe(kind, size, now - self._last_result, int(getattr(result, "num_correct_drafts", 0) or 0) + size)
        self._last_result, self._last_kind = now, kind

    def interrupted(self) -> None:
        """Something else than a decode was computed: the time until the next result is not a step's."""
        self._last_result = None

    # Run-time control

    def update(self, changes: Any) -> bool:
        """Change settings, or keep all and remember why."""
        try:
            if not isinstance(changes, Mapping):
                raise ValueError(f"must be a table of settings (is {changes!r})")
            self._require_candidate(changes.get("num_steps"))
            self.policy.update(changes)
        except ValueError as error:
            self.refused = str(error)
            logger.warning("%s is left as it is: %s", STATE, error)
            return False
        self.refused = None
        self._changed(f"set {json.dumps(dict(changes), sort_keys=True)}")
        return True

    def _require_candidate(self, num_steps: Any) -> None:
        """Raise ValueError for a depth that the server has no graphs and buffers for."""
        if num_steps is None or num_steps in self.candidate_steps:
            return
        depths = ", ".join(map(str, self.candidate_steps))
        which = f"one of {depths}" if depths else "null where --speculative-adaptive is not set"
        raise ValueError(f"num_steps must be {which} (is {num_steps!r})")

    def has_depths(self, candidate_steps: Iterable[int]) -> None:
        """Take the depths of the worker's adaptive speculation; raise ValueError where another one is forced from the start."""
        self.candidate_steps = tuple(sorted(candidate_steps))
        try:
            self._require_candidate(self.policy.settings.num_steps)
        except ValueError as error:
            raise ValueError(f"{MORE_SETTINGS}: {error}: correct it, or leave it out") from error

    def state(self) -> dict[str, Any]:
        """Return what ``/get_server_info`` shows."""
        worker = getattr(sys.modules.get("sglang.srt.speculative.aerie_dynamic_decode"), "live", None)
        return {
            **self.policy.state(),
            "candidate_steps": list(self.candidate_steps) or None,
            "refused": self.refused,
            **(worker.state() if worker is not None else {}),
        }


class Metrics:
    """Prometheus metrics with the labels of the scheduler's other ones."""

    def __init__(self, collector: Any) -> None:
        from prometheus_client import Counter, Gauge  # after SGLang chose the directory of its multiprocess mode

        gauge = getattr(collector, "_gauge_cls", None) or Gauge
        counter = getattr(collector, "_counter_cls", None) or Counter
        labels = dict(collector.labels)
        names = list(labels)

        def new_gauge(name: str, documentation: str) -> Any:
            made = gauge(name=f"sglang:aerie_dynamic_{name}", documentation=documentation, labelnames=names, multiprocess_mode="mostrecent")
            return made.labels(**labels)

        self.plain = new_gauge("plain", "Whether steps decode plainly (1) or speculate (0).")
        self.high = new_gauge("high", "Larger batches decode plainly.")
        self.low = new_gauge("low", "Batches up to this size speculate again.")
        steps = counter(name="sglang:aerie_dynamic_steps_total", documentation="Decode steps by kind.", labelnames=[*names, "kind"])
        self.steps = {kind: steps.labels(**labels, kind=kind) for kind in aerie_dynamic_policy.KINDS}
        switches = counter(
            name="sglang:aerie_dynamic_switches_total",
            documentation="Switches between speculation and plain decode, by reason.",
            labelnames=[*names, "reason"],
        )
        self.switches = {reason: switches.labels(**labels, reason=reason) for reason in aerie_dynamic_policy.REASONS}

    def stepped(self, plain: bool) -> None:
        self.steps[PLAIN if plain else SPECULATIVE].inc()

    def switched(self, policy: Policy) -> None:
        self.plain.set(float(policy.plain))
        self.switches[policy.reason].inc()

    def set(self, policy: Policy) -> None:
        self.plain.set(float(policy.plain))
        self.high.set(policy.settings.high)
        self.low.set(policy.settings.low)


def start(worker: Any) -> Control | None:
    """Start this process's control for the worker of its scheduler; None where the argument is not set."""
    global _control
    wanted = settings(resolved(worker.server_args))
    if wanted is None:
        return None
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    rank = group.rank_in_group
    if group.world_size > 1:  # a calibration or variable may be another one on another node
        wanted = group.broadcast_object(wanted, 0)
    _control = Control(Policy(wanted), rank, group.world_size)
    if _collector is not None:
        add_metrics(_collector)
    if rank == 0:
        logger.info(
            "Dynamic speculation: batches above %d decode plainly, at %d they speculate again; a mode is kept for %d steps",
            wanted.high,
            wanted.low,
            wanted.min_dwell_steps,
        )
    return _control


# For hooks


def add_metrics(collector: Any) -> None:
    """The scheduler's metrics were made: ours go beside them, once both they and the control are there."""
    global _collector
    _collector = collector
    if _control is not None and _control.rank == 0 and _control.metrics is None:
        _control.metrics = Metrics(collector)
        _control.metrics.set(_control.policy)


def add_state(state: dict[str, Any]) -> None:
    """The scheduler's state is being collected."""
    if _control is not None:
        state[STATE] = _control.state()


def set_internal_state(request: Any) -> Any:
    """Answer a request to change the scheduler's state that is about dynamic speculation; None for others, which are the scheduler's."""
    changes = request.server_args
    if STATE not in changes:
        nested = [name for name, value in changes.items() if isinstance(value, (dict, list))]
        if not nested:
            return None
        logger.warning("%s takes a number", ", ".join(nested))  # the scheduler's own settings all do
        return _answer(False)
    if len(changes) > 1:
        logger.warning("%s is to be set alone, not together with %s", STATE, ", ".join(sorted(set(changes) - {STATE})))
        return _answer(False)
    if _control is None:
        logger.warning("%s can't be set: this server was started without %s", STATE, FLAG)
        return _answer(False)
    return _answer(_control.update(changes[STATE]))


def _answer(updated: bool) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    fields = {"updated": updated}
    if "server_args" in SetInternalStateReqOutput.__annotations__:  # up to 0.5.15
        fields["server_args"] = {}
    return SetInternalStateReqOutput(**fields)


def forced_steps() -> int | None:
    """Return the depth that is forced; None where adaptive speculation chooses it."""
    return None if _control is None else _control.policy.settings.num_steps


def result_begins(result: Any) -> None:
    """A decode's result is about to be read on the host."""
    if _control is not None:
        _control.result_begins(result)


def holder(req: Any, name: str) -> Any:
    """Return what has a request's counts: the request, or what is beside it, from 0.5.16 for ALLOCATED and from 0.5.19 for COMMITTED."""
    beside = getattr(req, "kv", None)
    return beside if hasattr(beside, name) else req


def plain_tokens(processor: Any, result: Any, batch: Any, claimed: int = 0) -> list[list[int]] | None:
    """Return each request's token of a plain step, and count it as committed; None for a verification's result, which SGLang reads.

    SGLang would count it as a verification that accepted nothing. ``claimed`` tokens of a step were counted when it was prepared.
    """
    if _control is None or not _control.is_plain_result:
        return None
    tokens = result.next_token_ids.tolist()
    result.num_correct_drafts, result.num_correct_drafts_per_req_cpu = 0, [0] * len(tokens)
    for name in ("num_block_accept_tokens", "num_cap_tokens"):
        if hasattr(result, name):
            setattr(result, name, 0)
    advance = getattr(processor, "advance_grammar_fsm", None)  # from 0.5.17, where it may have happened before the next step was sampled
    if advance is not None and any(req.grammar is not None for req in batch.reqs):
        advance(result, batch)
    found = []
    for place, (req, token) in enumerate(zip(batch.reqs, tokens, strict=True)):
        kept = [token]
        if not req.is_retracted:
            counted = holder(req, COMMITTED)
            if req.finished():
                counted.kv_committed_len -= claimed
            else:
                if req.grammar is not None:
                    kept = processor._accept_grammar_tokens(req, kept) if advance is None else result.grammar_retained_tokens[place]
                counted.kv_committed_len += len(kept) - claimed
        found.append(kept)
    return found


def result_read(batch: Any, result: Any) -> None:
    """A decode's result was read on the host."""
    if _control is not None:
        _control.result_read(batch, result)


def interrupted() -> None:
    """The result of something else than a decode is read."""
    if _control is not None:
        _control.interrupted()


def is_plain_result() -> bool:
    """Say whether the result being read is a plain decode's, which says nothing about acceptance."""
    return _control is not None and _control.is_plain_result


def report_begins(reporter: Any) -> None:
    """The scheduler may be about to divide by the verifications since its last report. Without one, the acceptance length is 1."""
    if _control is not None and not reporter.spec_num_forward_ct:
        reporter.spec_num_forward_ct = reporter.spec_num_accept_tokens = FEW


def correct_request(meta_info: dict[str, Any]) -> None:
    """A request's acceptance length comes from its verifications alone: SGLang divides all its tokens by them, plainly decoded ones too."""
    if _is_wanted and meta_info.get("spec_verify_ct"):
        meta_info["spec_accept_length"] = 1 + meta_info["spec_num_correct_drafts"] / meta_info["spec_verify_ct"]
