"""The files of an inventory as text, before Ansible reads them: where one is no YAML, holds a key
twice, or is hidden by another. Ansible itself tells some of that without the file or the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

VARIABLE_DIRECTORIES = ("group_vars", "host_vars")
SUFFIXES = ("", ".yml", ".yaml", ".json")
"""In the order in which ``DataLoader.find_vars_files`` of ansible-core looks, and takes the first."""
ENCRYPTED = "$ANSIBLE_VAULT"
MERGE = "tag:yaml.org,2002:merge"
HINTS = {
    "mapping values are not allowed here": (
        "quote a value that contains a colon and a space; else this line or the one above it has the wrong indentation"
    ),
    "found character '\\t' that cannot start any token": "indent with spaces, not with tabs",
    "could not find expected ':'": "this line or the one above it lacks its colon",
}


def problems(bases: Iterable[Path]) -> list[str]:
    """Return what is wrong with the variable files below ``bases``, each with file, line and column."""
    return [problem for path in _variable_files(bases) for problem in _file_problems(path)]


def hidden_files(bases: Iterable[Path]) -> list[str]:
    """Return a sentence for each variable file that Ansible does not read because of another one."""
    sentences = []
    for directory in _variable_directories(bases):
        for name in sorted({_stem(path) for path in directory.iterdir()}):
            first, *others = _candidates(directory, name)
            sentences += [f"{other} is not read, since {_described(first)} hides it: {_move(first, other)}" for other in others]
    return sentences


def source_directories(sources: Iterable[str], working_directory: Path) -> list[Path]:
    """Return the directories of inventory sources (``-i``) that are files or directories."""
    paths = [working_directory / source for source in sources if "," not in source]
    return list(dict.fromkeys(path if path.is_dir() else path.parent for path in paths if path.exists()))


def _variable_directories(bases: Iterable[Path]) -> list[Path]:
    return [base / name for base in bases for name in VARIABLE_DIRECTORIES if (base / name).is_dir()]


def _variable_files(bases: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that Ansible reads for some host or group.

    Of files beside each other only those with a suffix: any other may be a note of somebody.
    """
    for directory in _variable_directories(bases):
        for name in sorted({_stem(path) for path in directory.iterdir()}):
            for path in _candidates(directory, name)[:1]:
                if path.is_dir():
                    yield from (file for file in sorted(path.rglob("*")) if _is_read(file))
                elif path.suffix in SUFFIXES[1:]:
                    yield path


def _is_read(path: Path) -> bool:
    """Say whether Ansible reads a file of a directory: no hidden one, and no editor's backup."""
    is_hidden = path.name.startswith(".") or path.name.endswith("~")
    return path.is_file() and path.suffix in SUFFIXES and not is_hidden


def _stem(path: Path) -> str:
    return path.stem if path.suffix in SUFFIXES and not path.is_dir() else path.name


def _candidates(directory: Path, name: str) -> list[Path]:
    return [path for suffix in SUFFIXES if (path := directory / f"{name}{suffix}").exists()]


def _described(path: Path) -> str:
    return f"the directory {path.name}/" if path.is_dir() else path.name


def _move(first: Path, other: Path) -> str:
    return f"move it to {first / 'main.yml'}" if first.is_dir() else f"keep one of {first.name} and {other.name}"


def _file_problems(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return [f"{path}: it is not UTF-8 (byte {error.start}): save it as UTF-8"]
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    if text.startswith(ENCRYPTED):
        return []
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        return [_syntax_problem(path, text, error)]
    except yaml.YAMLError as error:
        return [f"{path}: {error}"]
    return list(_repeated_keys(path, node)) if node else []


def _syntax_problem(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    problem = str(error.problem or error.context or error)
    if problem.startswith("but ") and error.context:
        problem = f"{error.context}, {problem}"
    if mark is None:
        return f"{path}: {problem}"
    lines = text.splitlines()
    # A sequence or mapping that is not closed is noticed at the end of the file; it begins where the context is.
    begin = error.context_mark if mark.line >= len(lines) and error.context_mark else mark
    hint = HINTS.get(problem)
    where = f"{path}:{begin.line + 1}:{begin.column + 1}"
    # As they stand, since indentation is what is wrong most often.
    excerpt = [f"    | {line}" for line in lines[max(begin.line - 1, 0) : begin.line + 1]]
    excerpt += [f"    | {' ' * begin.column}^"] if excerpt else []
    return "\n".join((f"{where}: {problem}" + (f": {hint}" if hint else ""), *excerpt))


def _repeated_keys(path: Path, root: yaml.Node) -> Iterator[str]:
    """Yield each key that a mapping holds twice; of the two values, YAML's readers keep the last."""
    nodes, visited = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in visited:  # an alias is the node of its anchor
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in reversed(node.value)]
            yield from _repeated_keys_of(path, node)


def _repeated_keys_of(path: Path, mapping: yaml.MappingNode) -> Iterator[str]:
    first_lines: dict[str, int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
            continue
        line, column = key.start_mark.line + 1, key.start_mark.column + 1
        if key.value in first_lines:
            yield (
                f"{path}:{line}:{column}: {key.value!r} is there twice, the first time in line {first_lines[key.value]}: keep one of them"
            )
        first_lines.setdefault(key.value, line)
