"""Runs the search of playbooks/tune_nccl.yml without Ansible: its cores alone, on this machine. See tune_nccl.sh beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import types
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
for name, places in (("ansible", []), ("ansible.module_utils", [str(PROJECT / "module_utils")])):
    package = types.ModuleType(name)
    package.__path__ = places
    sys.modules.setdefault(name, package)
sys.path.insert(0, str(PROJECT / "plugins"))

from ansible.module_utils.aerie.errors import AerieError  # noqa: E402
from ansible.module_utils.aerie.paths import HostPaths  # noqa: E402
from ansible.module_utils.aerie.tuning import decision, tune_run  # noqa: E402

from aerie_controller import terminal  # noqa: E402
from aerie_controller.terminal_reports import nccl_search  # noqa: E402

KNOWN_BAD = [
    {
        "id": "proto-ll-alone",
        "severity": "error",
        "is": {"NCCL_PROTO": ["LL"]},
        "why": "old advice",
        "cure": "leave it out",
        "source": ["report"],
    }
]
SPACE = {
    "dimensions": {
        "NCCL_PROTO": [None, "LL", "LL128", "Simple"],
        "NCCL_ALGO": [None, "Ring", "Tree"],
        "NCCL_MIN_NCHANNELS": [None, "4", "8", "16"],
        "NCCL_BUFFSIZE": [None, "1048576", "8388608"],
    }
}
HANG = {"dimensions": {"AERIE_NCCL_TEST_HANG": [None, "1"]}}
MODEL = {"config": {"hidden_size": 7168, "torch_dtype": "bfloat16", "num_attention_heads": 64}}


def gpus() -> list[dict[str, Any]]:
    """Return what nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [dict(zip(("index", "name", "driver"), (int(line.split(", ")[0]), *line.split(", ")[1:]), strict=True)) for line in lines]


def links() -> dict[str, str]:
    """Return what nvidia-smi topo says lies between GPUs."""
    output = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in output.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > 1 and not row[1].startswith("GPU")]
    return {f"{a}-{b}": rows[a][1 + b] for a in range(len(rows)) for b in range(a + 1, len(rows)) if len(rows[a]) > 1 + b}


def given(root: Path, **changes: Any) -> dict[str, Any]:
    """Return the module's parameters."""
    found = gpus()
    base: dict[str, Any] = {
        "run_id": "gpu", "host": "gpu", "table": {"profiles": {}, "known_bad": KNOWN_BAD}, "space": SPACE, "profile": None,
        "environment": {"NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1"}, "ranks": int(os.environ.get("RANKS") or 2), "gpus": None,
        "backend": "nccl", "python": os.environ.get("PYTHON") or sys.executable, "most": int(os.environ.get("CANDIDATES") or 10),
        "finalists": 2, "final_rounds": int(os.environ.get("ROUNDS") or 5), "minimum_effect": 0.02,
        "repeats": 15, "seconds": 60.0, "seed": 1,
        "target": MODEL, "draft_tokens": 4, "concurrency": [1, 4, 16], "prefill_tokens": [1024, 4096],
        "objectives": ["latency", "throughput"], "host_info": {"gpus": found, "topology": {"links": links()}},
    }  # fmt: skip
    return base | changes


def main() -> None:
    """Search, then search again with a rank that hangs, and leave what was found in OUT."""
    out = Path(os.environ["OUT"])
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name, (out / "progress.log").open("w") as log:
        paths = HostPaths(Path(name))

        def tell(message: str) -> None:
            line = f"{time.monotonic() - started:6.1f} s  {message}"
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()

        result = tune_run.run(tune_run.prepare(paths, tune_run.Request.of(given(paths.root))), tell)
        decisions, seconds = decision.decide(result, None), f"{time.monotonic() - started:.0f}"
        try:
            table = terminal.render(nccl_search.parts(result, decisions, {}, {"seconds": seconds}), 100)
        except AerieError as error:  # without rich; the result is what counts
            table = f"{error}\n"
        print(table)
        (out / "table.txt").write_text(table)
        (out / "result.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        with tarfile.open(out / "launches.tar.gz", "w:gz") as archive:
            archive.add(paths.root / "nccl/gpu/search", arcname="search")
        hung = given(paths.root, run_id="hang", space=HANG, seconds=12.0, final_rounds=3, repeats=5)
        after = tune_run.run(tune_run.prepare(paths, tune_run.Request.of(hung)), tell)
        (out / "hang.json").write_text(json.dumps(after, indent=1, sort_keys=True) + "\n")
        if [one["candidate"] for one in after["disqualified"]] != ["AERIE_NCCL_TEST_HANG=1"]:
            sys.exit("the rank that hung was not disqualified")
        tell(f"all done; {result['launches']} + {after['launches']} launches")


if __name__ == "__main__":
    main()
