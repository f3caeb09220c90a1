"""Models: whether a directory holds a whole one, and which one it is, by content. Standard library only: this runs on hosts.

A model's identity is a hash over the names, sizes and hashes of the files that a server reads: configuration, tokenizer,
index and weights. Hashing tens of GB is done once: the hashes are kept by name, size and time of change of every file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import canonical_hash, fsync_dir, read_json, sha256_file, write_json
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving import launch_checks
from ansible.module_utils.aerie.words import listing

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SUFFIXES = (*WEIGHTS, ".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")
CONFIG_KEYS = (
    "architectures",
    "draft_vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "model_type",
    "num_hidden_layers",
    "target_hidden_size",
    "vocab_size",
)
LFS_POINTER = b"version https://git-lfs"
FETCHING = ".aerie-fetch.json"
"""Marks a directory whose model is not whole yet."""


@dataclass(frozen=True)
class File:
    """One file of a model."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Model:
    """A model as a server would load it."""

    path: Path
    files: tuple[File, ...]
    config: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """The hash of all that makes the model what it is; where it lies is no part of it."""
        return canonical_hash([[file.name, file.size, file.sha256] for file in sorted(self.files, key=lambda file: file.name)])

    def summary(self) -> dict[str, Any]:
        """Return what matters of the configuration; multimodal models keep some of it in ``text_config``."""
        nested = self.config.get("text_config")
        flat = {**(nested if isinstance(nested, Mapping) else {}), **self.config}
        return {key: flat[key] for key in CONFIG_KEYS if key in flat}

    def as_dict(self) -> dict[str, Any]:
        """Return what a module says of the model."""
        return {
            "path": str(self.path),
            "identity": self.identity,
            "bytes": sum(file.size for file in self.files),
            "files": len(self.files),
            "config": self.summary(),
        }


def list_files(directory: Path) -> list[Path]:
    """Return the files of a model's directory that a server may read, by name; links are followed."""
    return sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file())


def problems(directory: Path, *, weights: bool = True) -> list[str]:
    """Return all that keeps a server from loading the model in ``directory``; without ``weights``, those may be missing."""
    if not directory.is_dir():
        return [f"{directory} is no directory"]
    if (directory / FETCHING).exists():
        return [f"{directory} is only partly fetched: run the playbook that brings the models again"]
    try:
        names = {path.name: path for path in list_files(directory)}
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    return content_problems(names, directory, weights=weights)


def content_problems(names: Mapping[str, Path], directory: Path, *, weights: bool = True) -> list[str]:
    """Return what is wrong with the files of a model, by name, that is or will be in ``directory``."""
    found = []
    if "config.json" not in names:
        near = [path.parent.name for path in sorted(directory.glob("*/config.json"))]
        hint = f" (there is one in {listing(near)}: name that directory)" if near else ""
        found.append(f"{directory} has no config.json{hint}")
    else:
        found += _config_problems(names["config.json"])
    if not weights:
        return found
    for index in (path for name, path in names.items() if name.endswith(".index.json")):
        found += _index_problems(index, names)
    heavy = [path for path in names.values() if path.suffix in WEIGHTS]
    if not heavy:
        found.append(f"{directory} has no weight files ({listing(WEIGHTS, last='or')})")
    return found + [problem for path in heavy if (problem := _weight_problem(path))]


def _config_problems(path: Path) -> list[str]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return [f"{path} can't be read as JSON: {error}"]
    if not isinstance(value, dict):
        return [f"{path} holds no JSON object"]
    return []


def _index_problems(path: Path, names: Mapping[str, Path]) -> list[str]:
    try:
        listed = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return [f"{path} is no index of weights: {type(error).__name__}: {error}"]
    missing = [name for name in listed if name not in names]
    shown = listing(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return [f"{path.parent}: {len(missing)} of the {len(listed)} weight files of {path.name} are missing: {shown}"] if missing else []


def _weight_problem(path: Path) -> str | None:
    """Say what is wrong with a weight file that its first bytes can tell.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format: eight bytes of header length, a JSON
    header with each tensor's offsets, then the tensors up to the largest offset.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return f"{path} is a git-lfs pointer, not the weights: fetch them with git lfs pull"
        if path.suffix != ".safetensors":
            return None if size else f"{path} is empty"
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return f"{path} has {size} bytes, less than its own header: the copy was cut off"
        try:
            header = json.loads(stream.read(length))
            end = max((value["data_offsets"][1] for key, value in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return f"{path} is no safetensors file: its header can't be read"
    expected = 8 + length + end
    return None if size == expected else f"{path} has {size} bytes and must have {expected}: the copy was cut off, or is damaged"


def read(directory: Path, cache: Path | None = None, tell: Callable[[str], None] | None = None) -> Model:
    """Return the model in ``directory``; hashes that are known in ``cache`` are not computed again."""
    paths = list_files(directory)
    files = _kept(directory, paths, cache) if cache else None
    if files is None:
        hashed = []
        for path in paths:
            if tell:
                tell(f"hashing {path.name}")
            hashed.append(File(path.name, path.stat().st_size, sha256_file(path)))
        files = tuple(hashed)
    return Model(directory, files, json.loads((directory / "config.json").read_bytes()))


def known(directory: Path, cache: Path) -> str | None:
    """Return the identity of the files in ``directory`` as they are now when their hashes are in ``cache``; nothing is hashed."""
    try:
        files = _kept(directory, list_files(directory), cache)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if files is None else Model(directory, files, {}).identity


def other_model(where: object, found: str, wanted: str | None, cure: str) -> list[str]:
    """Return the problem that the model at ``where`` is not the one that the catalog asks for; without ``wanted`` any will do."""
    if wanted is None or found == wanted:
        return []
    return [
        f"{where} is another model than the one asked for: its identity is {found[:12]}, and {wanted[:12]} is asked for: {cure}, or, "
        f"where this one is meant, set identity to {found}"
    ]


def remember(model: Model, cache: Path) -> bool:
    """Keep a model's hashes for the next time; say whether they were new."""
    path = _place(model.path, list_files(model.path), cache)
    if path.exists():
        return False
    write_json(path, {"path": str(model.path), "identity": model.identity, "files": [vars(file) for file in model.files]})
    return True


def _kept(directory: Path, paths: list[Path], cache: Path) -> tuple[File, ...] | None:
    path = _place(directory, paths, cache)
    return tuple(File(**entry) for entry in read_json(path)["files"]) if path.exists() else None


def _place(directory: Path, paths: list[Path], cache: Path) -> Path:
    """Return where the hashes of a model's files are kept: another place as soon as one of them was touched."""
    stats = [(path.name, path.stat()) for path in paths]
    key = canonical_hash([str(directory), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]])[:32]
    return cache / f"{key}.json"


def manifest(directory: Path, cache: Path | None = None) -> dict[str, Any]:
    """Return what a controller sends ahead of a model: its configuration and its files by name."""
    model = read(directory, cache)
    if cache:
        remember(model, cache)
    return {"config": dict(model.config), "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in model.files}}


def of_manifest(path: Path, value: Mapping[str, Any]) -> Model:
    """Return the model that a manifest describes, as it will be at ``path``."""
    return Model(path, tuple(File(name, entry["size"], entry["sha256"]) for name, entry in sorted(value["files"].items())), value["config"])


def missing(directory: Path, wanted: Model, cache: Path) -> list[str]:
    """Return which files of ``wanted`` are not in ``directory`` as they must be; raise when it holds others.

    Files that we never sent are never removed: they might be somebody's.
    """
    if not directory.exists():
        return [file.name for file in wanted.files]
    paths = list_files(directory)
    strange = sorted({path.name for path in paths} - {file.name for file in wanted.files})
    if strange:
        raise AerieError(
            f"{directory} holds {listing(strange)}, which the controller's copy has not: remove it, or rename the model's directory"
        )
    there = {file.name: file for file in read(directory, cache).files} if any(path.name == "config.json" for path in paths) else {}
    return [file.name for file in wanted.files if there.get(file.name) != file]


def receive(directory: Path, wanted: Model, incoming: Mapping[str, Path]) -> None:
    """Move files that were sent into place: all are checked first, and each replaces what was there in one step."""
    by_name = {file.name: file for file in wanted.files}
    for name, path in incoming.items():
        if name not in by_name or sha256_file(path) != by_name[name].sha256:
            raise AerieError(f"{path} did not arrive as {name} of {directory}: run again")
    directory.mkdir(parents=True, exist_ok=True)
    for name, path in incoming.items():
        beside = directory / f".{name}.incoming"
        shutil.copyfile(path, beside)
        beside.chmod(0o644)
        beside.replace(directory / name)
    fsync_dir(directory)


def fit_problems(configs: Mapping[str, Mapping[str, Any]], arms: Mapping[str, Any], instances: Mapping[str, Any]) -> list[str]:
    """Return why a draft can't speculate for the target that it would be served with.

    ``configs`` are the models' config.json by name. Every arm may be measured on the host's model where there is one model only;
    with several, an instance's own arm must fit.
    """
    targets = {str(instance["model"]) for instance in instances.values()}
    pairs = {(str(instance["model"]), str(instance["arm"])) for instance in instances.values()}
    if len(targets) == 1:
        pairs |= {(next(iter(targets)), name) for name in arms}
    found: list[str] = []
    for target_name, arm_name in sorted(pairs):
        speculation = (arms.get(arm_name) or {}).get("speculation") or {}
        draft_name = speculation.get("draft_model")
        if target_name in configs and isinstance(draft_name, str) and draft_name in configs:
            algorithm = str(speculation.get("algorithm", "")).upper()
            problems = launch_checks.draft_problems(algorithm, target_name, configs[target_name], draft_name, configs[draft_name])
            found += [f"arm {arm_name}: {problem}" for problem in problems]
    return found


def cache_of(paths: HostPaths) -> Path:
    """Return where hashes are kept on a host."""
    return paths.models / "identities"
