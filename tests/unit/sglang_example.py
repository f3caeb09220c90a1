"""A release, models and requests for tests of servers: what is on a host, with a program in SGLang's place."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving.server_plan import Host, Request

VERSION = "0.5.23"
RELEASE = f"{VERSION}-0123456789ab"
FAKE = Path(__file__).with_name("fake_sglang.py")


def _row(*flags: str, **settings: Any) -> dict[str, Any]:
    dest = flags[0].removeprefix("--").replace("-", "_")
    return {"flags": list(flags), "dest": dest, "type": "str", "choices": None, "nargs": None, "default": None, "help": "", **settings}


def _switch(*flags: str, **settings: Any) -> dict[str, Any]:
    return _row(*flags, **{"type": None, "nargs": 0, "default": False, **settings})


ARGUMENTS = [
    # Taken from the parser of SGLang 0.5.23.
    _row("--model-path", "--model"),
    _row("--host"),
    _row("--port", type="int"),
    _row("--served-model-name"),
    _row("--api-key"),
    _row("--config"),
    _switch("--enable-metrics"),
    _row("--device"),
    _row("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"]),
    _row("--mem-fraction-static", type="float"),
    _row("--max-running-requests", type="int"),
    _row("--tp-size", "--tensor-parallel-size", type="int"),
    _row("--pp-size", type="int"),
    _row("--dp-size", type="int"),
    _switch("--enable-dp-attention"),
    _row("--chunked-prefill-size", type="int"),
    _row("--cuda-graph-max-bs-decode", type="int"),
    _row("--cuda-graph-max-bs-prefill", type="int"),
    _row("--cuda-graph-bs-decode", type="int", nargs="+"),
    _row("--cuda-graph-backend-prefill", choices=["full", "breakable", "tc_piecewise", "disabled"]),
    _row("--json-model-override-args"),
    _row("--model-loader-extra-config", type="loads"),
    _switch("--disable-cuda-graph", deprecated=True, help="Deprecated. Use --cuda-graph-backend-{decode,prefill}=disabled instead."),
    _switch("--enable-fused-qk-norm-rope", "--no-enable-fused-qk-norm-rope"),
    _row("--speculative-algorithm"),
    _row("--speculative-draft-model-path"),
    _row("--speculative-num-steps", type="int"),
    _row("--speculative-eagle-topk", type="int"),
    _row("--speculative-num-draft-tokens", type="int"),
    _row("--speculative-token-map"),
]

TARGET = {"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "vocab_size": 1024}
DRAFT = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 128, "vocab_size": 1024, "draft_vocab_size": 512}
EAGLE3 = {"name": "eagle3", "speculation": {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4}}
BASELINE: dict[str, Any] = {"name": "baseline", "speculation": None}


def supervisord() -> Path:
    """Return supervisor's program beside this Python, or on the PATH; it belongs to the development requirements."""
    beside = Path(sys.executable).with_name("supervisord")
    found = str(beside) if beside.exists() else shutil.which("supervisord")
    assert found, "supervisor is not installed: run `make unit`, which installs it"
    return Path(found)


def make_release(root: Path, arguments: list[dict[str, Any]] | None = None) -> Path:
    """Make a release whose ``bin/python`` runs a program in SGLang's place, and let ``current`` mean it."""
    release = root / "releases" / RELEASE
    (release / "bin").mkdir(parents=True)
    launcher = release / "bin/python"
    launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"\n')
    launcher.chmod(0o755)
    (release / "server_arguments.json").write_text(json.dumps(ARGUMENTS if arguments is None else arguments))
    content = {"id": RELEASE, "sglang_version": VERSION, "environment": {"id": "e", "path": str(root / "environments/e")}}
    (release / "release.json").write_text(json.dumps(content))
    (root / "current").symlink_to(f"releases/{RELEASE}")
    return release


def make_models(root: Path, target: dict[str, Any] = TARGET, draft: dict[str, Any] = DRAFT) -> dict[str, dict[str, Any]]:
    models = {}
    for name, config in (("target", target), ("draft", draft)):
        path = root / "models" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        models[name] = {"path": str(path), "identity": f"identity of {name}"}
    return models


def make_host(root: Path, stop_seconds: int = 10) -> Host:
    return Host(HostPaths(root), "supervisor", supervisord(), stop_seconds, root / "no-cuda")


def make_request(root: Path, arm: dict[str, Any] = EAGLE3, **changes: Any) -> Request:
    """Return a request that is right, apart from ``changes`` to it and, under ``instance``, to its instance."""
    instance = {"model": "target", "port": 30000, **changes.pop("instance", {})}
    models = changes.pop("models", None) or make_models(root)
    settings: dict[str, Any] = {"name": "main", "models": models, "profile": {"name": "cpu"}, "driver": "580.95", **changes}
    return Request(instance=instance, arm=arm, **settings)
