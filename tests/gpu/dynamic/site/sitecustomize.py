"""What tokens.sh puts into SGLang on a GPU. Python imports this at its start where the directory is on PYTHONPATH.

AERIE_TEST_NATIVE names layers that run as torch's own operators, in all servers that are compared: those whose kernels know no float32
(sgl-kernel 0.4.4 has RMSNorm for 16-bit types only), round it (the activation is compiled with fast math), or are seldom used (the rotation
for heads of 32). Attention, projections and sampling stay.
AERIE_TEST_STEPS=FILE makes the worker write its decode steps, as tests/e2e/cpu_server has it, but only while FILE.on exists: to write them
it waits for the GPU, which would hide an error of order between streams.
AERIE_TEST_ACCEPTANCE='{"1": 1.665, "3": 2.4}' pins the acceptance length by the number of drafted tokens, where SGLANG_SIMULATE_ACC_LEN
pins it for all: a server that changes its depth accepts less of fewer.
AERIE_TEST_WEIGHTS=normal makes made-up weights ones whose logits differ (SGLang's are below 1e-3, and so are its logits).
AERIE_TEST_HOST_TIME=1 has the scheduler write what its thread did for each step (host_time_spy), beside the instance's log.
"""

from __future__ import annotations

import importlib.util
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SHARED = Path(__file__).resolve().parents[3] / "e2e/cpu_server/sitecustomize.py"
Change = Callable[[ModuleType], None]
NATIVE = os.environ.get("AERIE_TEST_NATIVE", "").split()


def run_natively(module: ModuleType) -> None:
    dispatch = module.MultiPlatformOp.dispatch_forward

    def chosen(self: Any) -> Any:
        return self.forward_native if type(self).__name__ in NATIVE else dispatch(self)

    module.MultiPlatformOp.dispatch_forward = chosen


def write_steps_while_asked(module: ModuleType) -> None:
    worker, drafter = module.EAGLEWorkerV2, module.EagleDraftWorker
    quiet = worker.forward_batch_generation, drafter.draft
    shared.write_steps(module)
    noted = worker.forward_batch_generation, drafter.draft
    switch = f"{os.environ['AERIE_TEST_STEPS']}.on"

    def step(self: Any, *given: Any, **named: Any) -> Any:
        return (noted if os.path.exists(switch) else quiet)[0](self, *given, **named)  # noqa: PTH110 (each step: as cheap as can be)

    def draft(self: Any, *given: Any, **named: Any) -> Any:
        return (noted if os.path.exists(switch) else quiet)[1](self, *given, **named)  # noqa: PTH110

    worker.forward_batch_generation, drafter.draft = step, draft


def accept_by_depth(module: ModuleType) -> None:
    """Pin the acceptance length by depth. SGLang 0.5.15 spec_utils.py: (length, method, steps + 1)."""
    sample = module._sample_simulated_acc_len
    lengths = {int(steps): float(length) for steps, length in json.loads(os.environ["AERIE_TEST_ACCEPTANCE"]).items()}

    def sampled(length: float, method: str, most: int) -> int:
        return int(sample(lengths.get(most - 1, length), method, most))

    module._sample_simulated_acc_len = sampled


def weigh(module: ModuleType) -> None:
    """Have made-up matrices keep the size of what they are multiplied with, and norms leave it."""
    import torch

    def initialize(model: Any, *_: Any, **__: Any) -> None:
        for name, weights in model.state_dict().items():
            if not torch.is_floating_point(weights) or "cos_sin" in name:
                continue
            if weights.dim() < 2:
                weights.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(device=weights.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            weights.normal_(0.0, weights.shape[-1] ** -0.5, generator=generator)

    module.initialize_dummy_weights = initialize


def both(first: Change | None, then: Change) -> Change:
    def change(module: ModuleType) -> None:
        if first is not None:
            first(module)
        then(module)

    return change


spec = importlib.util.spec_from_file_location("aerie_cpu_server_site", SHARED)
if spec is not None and spec.loader is not None:
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    if NATIVE:
        shared.CHANGES["sglang.srt.layers.utils.multi_platform"] = run_natively
    if os.environ.get("AERIE_TEST_STEPS"):
        shared.CHANGES[shared.WORKER] = write_steps_while_asked
    if os.environ.get("AERIE_TEST_ACCEPTANCE"):
        shared.CHANGES["sglang.srt.speculative.spec_utils"] = accept_by_depth
    if os.environ.get("AERIE_TEST_WEIGHTS") == "normal":
        shared.CHANGES["sglang.srt.model_loader.loader"] = weigh
    if os.environ.get("AERIE_TEST_HOST_TIME"):
        import host_time_spy

        written = Path(os.environ["AERIE_ROOT"]) / "instances" / os.environ["AERIE_INSTANCE"] / "host_time.jsonl"
        for changes in (host_time_spy.changes(written), host_time_spy.calls(os.environ.get("AERIE_TEST_TIMED", ""))):
            for name, change in changes.items():
                shared.CHANGES[name] = both(shared.CHANGES.get(name), change)
