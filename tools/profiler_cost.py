#!/usr/bin/env python3
"""Says what the phase profiler's own Python costs a decode cycle, in microseconds: `tools/profiler_cost.py [OVERLAY]`; no GPU, no SGLang.

CUDA events are stand-ins that keep the processor busy for BUSY_NS, about as real ones do. A server has milliseconds between cycles, so that
its caches are colder and all of it costs more there: these figures compare versions of the overlay; playbooks/profile.yml measures one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

OVERLAY = Path(__file__).parents[1] / "patches/phase_profiler/overlay/sglang/srt/speculative/aerie_phase_profiler.py"
BUSY_NS = {"current_stream": 3000, "record": 2000, "query": 1000, "elapsed_time": 1500}
MARKS = ("kv", "draft", "tree_and_acceptance", "kv", "target_verify", "tree_and_acceptance", "kv", "remainder", "draft_extend", "remainder")
NEVER, CYCLES, ROUNDS = 10**18, 200, 60
STATES = (("off", None), ("on, not timed", "999999999"), ("on, timed", "1"), ("on, one of four", ""))


def busy(call: str) -> bool:
    end = time.perf_counter_ns() + BUSY_NS[call]
    while time.perf_counter_ns() < end:
        pass
    return True


class Event:
    def __init__(self, enable_timing: bool) -> None: ...

    def record(self, stream: object = None) -> None:
        if stream is None:
            busy("current_stream")
        busy("record")

    def query(self) -> bool:
        return busy("query")

    def elapsed_time(self, _later: object) -> float:
        busy("elapsed_time")
        return 0.123456


def loaded(overlay: Path, directory: str) -> Any:
    os.environ["AERIE_PROFILE_DIR"] = directory
    spec = importlib.util.spec_from_file_location("aerie_phase_profiler", overlay)
    if spec is None or spec.loader is None:
        sys.exit(f"{overlay} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def microseconds(profiler: Any) -> float:
    """Return what the hooks of one cycle take, in the quickest of the rounds: what else the machine does only adds to it."""
    worker = types.SimpleNamespace(device="cuda", speculative_num_steps=3, tp_rank=0)
    batch = types.SimpleNamespace(seq_lens=[0] * 8, forward_mode=types.SimpleNamespace(is_idle=lambda: False))
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        for _ in range(CYCLES):
            profiler.begin(worker, batch)
            for phase in MARKS:
                profiler.mark(phase, phase == "draft")
            profiler.end()
        found.append((time.perf_counter_ns() - started) / CYCLES / 1000)
    return min(found)


def main() -> None:
    overlay = Path(sys.argv[1]) if len(sys.argv) > 1 else OVERLAY
    cuda = types.SimpleNamespace(Event=Event, current_stream=lambda: busy("current_stream"))
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    print(f"{'us a cycle':<16} {'as it is':>9} {'looking at the files':>21}")
    for name, content in STATES:
        with tempfile.TemporaryDirectory() as directory:
            if content is not None:
                Path(directory, "on").write_text(content)
            figures = []
            for look in (NEVER, 0):
                profiler = loaded(overlay, directory)
                profiler.LOOK_NS = look
                figures.append(microseconds(profiler))
        print(f"{name:<16} {figures[0]:>9.2f} {figures[1]:>21.2f}")


if __name__ == "__main__":
    main()
