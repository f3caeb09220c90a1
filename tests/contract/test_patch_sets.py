"""The project's patch sets against real SGLang wheels: hooks land where they are meant to, and nothing else changes."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest
import wheels
from ansible.module_utils.aerie import anchors, patch_plan, patch_transaction
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patch_store import PatchStore
from ansible.module_utils.aerie.source_tree import SourceTree

from aerie_controller import patch_sets

pytestmark = pytest.mark.contract

VERSIONS = ("0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.23")
WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
COMMON = "sglang/srt/speculative/eagle_worker_common.py"
PROFILER = "aerie_phase_profiler"


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pristine(version: str, tmp_path_factory: pytest.TempPathFactory) -> SourceTree:
    """The wheel's tree, which no test changes."""
    return SourceTree.open(wheels.unpack("sglang", version, tmp_path_factory.mktemp("wheel")), "sglang")


def planned(tree: SourceTree, *names: str) -> dict[str, patch_plan.FileChange]:
    plan = patch_plan.plan(tree, PatchStore.beside(tree, tree.path.with_name("no-store")), patch_sets.load(names))
    return {file.path: file for file in plan.files}


def calls(function: ast.AST) -> list[tuple[str, tuple[object, ...]]]:
    """The calls of ``function`` in the order of the source, each with its constant arguments."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [(anchors.dotted(node.func) or "", tuple(word.value for word in node.args if isinstance(word, ast.Constant))) for node in found]


def function(source: bytes, *path: str) -> ast.AST:
    node: ast.AST = ast.parse(source)
    for name in path:
        node = next(child for child in ast.walk(node) if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name)
    return node


def decode_branch(source: bytes) -> list[ast.stmt]:
    body = function(source, "EAGLEWorkerV2", "forward_batch_generation").body
    (split,) = [statement for statement in body if isinstance(statement, ast.If)]
    return split.orelse


def marks(node: ast.AST, *others: str) -> list[str]:
    """Our marks in order, as phases, with the calls of ``others`` among them."""
    words = []
    for name, arguments in calls(node):
        if name.startswith(f"{PROFILER}."):
            words.append(str(arguments[0]) if arguments else name.removeprefix(f"{PROFILER}."))
        elif name in others:
            words.append(f"<{name}>")
    return words


def test_every_patch_set_applies_to_every_version_it_is_for_and_comes_off_again(version, tmp_path):
    tree = SourceTree.open(wheels.unpack("sglang", version, tmp_path / "site-packages"), "sglang")
    store = PatchStore.beside(tree, tmp_path / "store")
    for one in patch_sets.load(patch_sets.available()):
        if tree.version not in one.versions:
            continue
        before = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in tree.path.rglob("*") if path.is_file()}
        patch_transaction.apply(tree, store, patch_plan.plan(tree, store, [one]))
        assert patch_plan.drift(tree, store, [one]) == []
        patch_transaction.apply(tree, store, patch_plan.plan(tree, store, []))
        assert {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in tree.path.rglob("*") if path.is_file()} == before


def test_without_the_inserted_lines_the_files_are_the_wheels(pristine):
    for one in patch_sets.load(patch_sets.available()):
        if pristine.version not in one.versions:
            continue
        for file in planned(pristine, one.name).values():
            if file.kind != patch_plan.PATCHED:
                continue
            hooks = [hook for hook in one.hooks_for(pristine.version) if hook.file == file.path]
            derived, _ = anchors.derive(file.original, hooks, file.path)
            rest = derived.data
            for insertion in reversed(derived.insertions):
                start = insertion.offset + sum(len(one.text) for one in derived.insertions[: derived.insertions.index(insertion)])
                assert rest[start : start + len(insertion.text)] == insertion.text
                rest = rest[:start] + rest[start + len(insertion.text) :]
            assert hashlib.sha256(rest).hexdigest() == pristine.record[file.path]
            assert file.wanted == derived.data


def test_a_version_from_before_is_refused(tmp_path, pristine):
    older = SourceTree(pristine.path, "sglang", type(pristine.version).parse("0.5.14"), pristine.record)
    with pytest.raises(AerieError, match=r"phase_profiler is for >=0.5.15, not for 0.5.14"):
        planned(older, "phase_profiler")


# phase_profiler


def test_a_cycle_is_begun_and_ended_once_around_all_of_the_decode_branch(pristine):
    branch = decode_branch(planned(pristine, "phase_profiler")[WORKER].wanted)
    assert ast.unparse(branch[0]) == f"{PROFILER}.begin(self, batch)"
    assert ast.unparse(branch[-2]) == f"{PROFILER}.end()"
    assert isinstance(branch[-1], ast.Return)
    leaves = [node for statement in branch for node in ast.walk(statement) if isinstance(node, ast.Return)]
    assert leaves == [branch[-1]]


def test_phases_of_the_decode_branch_are_in_the_order_of_the_work(pristine):
    branch = ast.Module(decode_branch(planned(pristine, "phase_profiler")[WORKER].wanted), [])
    others = ("self.verify", "self.draft_worker._draft_extend_for_decode")
    expected = ["begin", "<self.verify>", "remainder", "draft_extend", "<self.draft_worker._draft_extend_for_decode>", "remainder", "end"]
    assert marks(branch, *others) == expected


def test_phases_of_the_draft_are_in_the_order_of_the_work(pristine):
    source = planned(pristine, "phase_profiler")[WORKER].wanted
    tree_builder = "build_tree_kernel_efficient" if pristine.version.text.startswith("0.5.15") else "build_eagle_verify_input"
    draft = function(source, "EagleDraftWorker", "draft")
    expected = [
        "kv",
        "draft",
        "<self.cuda_graph_runner.execute>",
        "draft",
        "<self.draft_forward>",
        "tree_and_acceptance",
        f"<{tree_builder}>",
    ]
    assert marks(draft, "self.cuda_graph_runner.execute", "self.draft_forward", tree_builder) == expected
    graph = [node for node in ast.walk(draft) if isinstance(node, ast.Call) and any(word.arg == "graph" for word in node.keywords)]
    (branch,) = [
        node
        for node in ast.walk(draft)
        if isinstance(node, ast.If) and graph[0] in [child.value for child in node.body if isinstance(child, ast.Expr)]
    ]
    assert "self.cuda_graph_runner.execute" in [name for name, _ in calls(ast.Module(branch.body, []))]


def test_each_draft_step_begins_its_loop(pristine):
    source = planned(pristine, "phase_profiler")[WORKER].wanted
    (loop,) = [
        node
        for node in ast.walk(function(source, "EagleDraftWorker", "draft_forward"))
        if isinstance(node, ast.For) and "speculative_num_steps" in ast.unparse(node.iter)
    ]
    assert ast.unparse(loop.body[0]) == f"{PROFILER}.draft_step({ast.unparse(loop.target)})"


def test_phases_of_the_verification_are_in_the_order_of_the_work(pristine):
    files = planned(pristine, "phase_profiler")
    if pristine.version.text.startswith("0.5.15"):
        verify, prefix, forward = (
            function(files[WORKER].wanted, "EAGLEWorkerV2", "verify"),
            "self.",
            "self.target_worker.forward_batch_generation",
        )
    else:
        verify, prefix, forward = function(files[COMMON].wanted, "run_eagle_verify"), "", "target_worker.forward_batch_generation"
        assert [name for name, _ in calls(function(files[WORKER].wanted, "EAGLEWorkerV2", "verify"))] == ["run_eagle_verify"]
    names = ("eagle_prepare_for_verify", forward, "eagle_sample", f"{prefix}_finalize_accept_tree_path")
    prepare, target, sample, finalize = (f"<{name}>" for name in names)
    assert marks(verify, *names) == ["kv", prepare, "target_verify", target, "tree_and_acceptance", sample, "kv", finalize]


def test_the_profiler_is_imported_once_where_it_is_used(pristine):
    for path, file in planned(pristine, "phase_profiler").items():
        if file.kind == patch_plan.PATCHED:
            assert file.wanted.decode().count(f"import {PROFILER}") == 1
            assert Path(path).name in ("eagle_worker_v2.py", "eagle_worker_common.py")
