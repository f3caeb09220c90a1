"""ShareGPT files, checked before a host is touched. Standard library only.

SGLang's clients read a list of conversations and send the first turn of each. They leave out, without a word, conversations
of fewer than two turns and prompts of fewer than two tokens, and then send fewer requests than they were asked for; an empty
prompt that does get through ends SGLang's scheduler (seen in 0.5.23).
Source: sglang/benchmark/datasets/sharegpt.py, 0.5.15.post1 and 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_bytes

FORM = '[{"conversations": [{"value": "a prompt"}, {"value": "an answer"}]}, ...]'
TURNS = ("conversations", "conversation")


@dataclass(frozen=True)
class Dataset:
    """A checked data set: where it is, its hash, how many entries it has and how many of them a client sends."""

    path: Path
    sha256: str
    entries: int
    usable: int


def check(path: Path, wanted: int) -> Dataset:
    """Return the data set at ``path``; raise AerieError when it could kill a server or gives fewer than ``wanted`` prompts."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise AerieError(f"data set {path}: {error.strerror}: workload.path is relative to the project's directory") from error
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise AerieError(f"data set {path}: not JSON ({error}): it must be {FORM}") from error
    if not isinstance(entries, list) or not entries:
        what = "an empty list" if entries == [] else f"a {type(entries).__name__}"
        raise AerieError(f"data set {path}: {what}: it must be {FORM}")
    usable = sum(_is_sent(path, index, entry) for index, entry in enumerate(entries))
    if usable < wanted:
        raise AerieError(
            f"data set {path}: {usable} of its {len(entries)} entries have two turns, and a cell sends {wanted} requests: "
            "the client would send fewer without a word; lower requests_per_client, minimum_requests or concurrency, or take more prompts"
        )
    return Dataset(path, sha256_bytes(raw), len(entries), usable)


def _is_sent(path: Path, index: int, entry: Any) -> bool:
    where = f"data set {path}, entry {index}"
    turns = next((entry[key] for key in TURNS if key in entry), None) if isinstance(entry, Mapping) else None
    if not isinstance(turns, list):
        raise AerieError(f"{where}: no list 'conversations': it must be {FORM}")
    if len(turns) < 2:
        return False
    for number, turn in enumerate(turns[:2]):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise AerieError(f"{where}, turn {number}: no text 'value': it must be {FORM}")
    if not turns[0]["value"].strip():
        raise AerieError(f"{where}: its prompt is empty, which ends SGLang's scheduler: remove the entry")
    return True
