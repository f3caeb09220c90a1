"""The project's patch sets against real SGLang wheels: hooks land where they are meant to, and nothing else changes."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import wheels
import worker_stubs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import anchors, patch_plan, patch_transaction
from ansible.module_utils.aerie.patching.patch_set import PatchSet
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.profiling import phases
from ansible.module_utils.aerie.specifiers import Version

import adopt_version
from aerie_controller import patch_sets

pytestmark = pytest.mark.contract

PATCHES = patch_sets.PATCHES
VERSIONS = adopt_version.known_versions(PATCHES)
WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
COMMON = "sglang/srt/speculative/eagle_worker_common.py"
V1_WORKER = "sglang/srt/speculative/eagle_worker.py"
V1_INFO = "sglang/srt/speculative/eagle_info.py"
PROFILER = "aerie_phase_profiler"
OVERLAY = PATCHES / f"phase_profiler/overlay/sglang/srt/speculative/{PROFILER}.py"


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pristine(version: str, tmp_path_factory: pytest.TempPathFactory) -> SourceTree:
    """The wheel's tree, which tests leave as it is."""
    return SourceTree.open(wheels.unpack("sglang", version, tmp_path_factory.mktemp("wheel")), "sglang")


@pytest.fixture(scope="module")
def profiled(pristine: SourceTree) -> dict[str, bytes]:
    """The files with the hooks of phase_profiler in them."""
    return {path: file.wanted for path, file in planned(pristine, "phase_profiler").items() if file.kind == patch_plan.PATCHED}


def planned(tree: SourceTree, *names: str) -> dict[str, patch_plan.FileChange]:
    plan = patch_plan.plan(tree, PatchStore.beside(tree, tree.path.with_name("no-store")), patch_sets.load(names))
    return {file.path: file for file in plan.files}


def with_needs(one: PatchSet) -> list[PatchSet]:
    """``one`` and, before it, the sets that it needs."""
    needed = {need.name: need for name in one.needs for need in with_needs(*patch_sets.load([name]))}
    return [*needed.values(), one]


def sets_for(version: Version) -> list[PatchSet]:
    return [one for one in patch_sets.load(patch_sets.available()) if adopt_version.is_for(one, version)]


def hashes(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*") if path.is_file()
    }


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


def marks(node: ast.AST, *others: str) -> list[str]:
    """Our marks in order, as phases, with the calls of ``others`` among them."""
    words = []
    for name, arguments in calls(node):
        if name.startswith(f"{PROFILER}."):
            words.append(str(arguments[0]) if arguments else name.removeprefix(f"{PROFILER}."))
        elif name in others:
            words.append(f"<{name}>")
    return words


# Every set, every version that it is for


def test_every_patch_set_applies_gives_what_is_committed_and_comes_off_again(version, pristine, tmp_path):
    # Links will do: files are replaced, never written to.
    tree = SourceTree.open(shutil.copytree(pristine.path, tmp_path / "site-packages", copy_function=os.link), "sglang")
    store = PatchStore.beside(tree, tmp_path / "store")
    before = hashes(tree.path)
    for one in sets_for(tree.version):
        together = with_needs(one)
        patch_transaction.apply(tree, store, patch_plan.plan(tree, store, together))
        assert patch_plan.drift(tree, store, together) == []
        now = hashes(tree.path)
        changed = {path: sha256 for path, sha256 in now.items() if path in before and sha256 != before[path]}
        if not one.needs:
            assert changed == adopt_version.read_hashes(PATCHES, one.name)[version], "run tools/adopt_version.py --known, and read the diff"
        added = {path for path in now.keys() - before.keys() if "__pycache__" not in path}
        assert added == {path for each in together for path in each.overlay}
        patch_transaction.apply(tree, store, patch_plan.plan(tree, store, []))
        assert hashes(tree.path) == before
    assert hashes(pristine.path) == before


def test_all_sets_that_go_together_apply_together(pristine):
    sets = sets_for(pristine.version)
    names = [each.name for one in sets for each in with_needs(one) if not any(each.name in other.conflicts for other in sets)]
    files = planned(pristine, *dict.fromkeys(names))
    assert {hook.file for one in patch_sets.load(dict.fromkeys(names)) for hook in one.hooks_for(pristine.version)} <= files.keys()


def test_hashes_are_committed_for_every_known_version_that_a_set_is_for(pristine):
    with adopt_version.Release(pristine.version.text, wheels.wheel("sglang", pristine.version.text)) as release:
        assert list(adopt_version.stale(sets_for(pristine.version), release, PATCHES)) == []


@pytest.mark.parametrize("name", patch_sets.available())
def test_committed_hashes_are_in_order_and_of_versions_that_the_set_is_for(name, tmp_path):
    (one,) = patch_sets.load([name])
    committed = adopt_version.read_hashes(PATCHES, name)
    assert list(committed) == [version for version in VERSIONS if adopt_version.is_for(one, Version.parse(version))]
    (tmp_path / name).mkdir()
    adopt_version.write_hashes(tmp_path, name, committed)
    assert (tmp_path / name / "hashes.json").read_bytes() == (PATCHES / name / "hashes.json").read_bytes()


def test_without_the_inserted_lines_the_files_are_the_wheels(pristine):
    for one in sets_for(pristine.version):
        for path, hooks in adopt_version.by_file(one.hooks_for(pristine.version)).items():
            derived, problems = anchors.derive(pristine.read(path), hooks, path)
            assert problems == []
            rest = derived.data
            for insertion in reversed(derived.insertions):
                start = insertion.offset + sum(len(one.text) for one in derived.insertions[: derived.insertions.index(insertion)])
                assert rest[start : start + len(insertion.text)] == insertion.text
                rest = rest[:start] + rest[start + len(insertion.text) :]
            assert hashlib.sha256(rest).hexdigest() == pristine.record[path]


def test_the_sources_are_those_of_the_wheels_for_other_pythons():
    """Wheels are built per Python; those of one version differ in what is compiled, not in its sources, of which hashes.json tells."""
    one, other = (sources(adopt_version.fetch("sglang", VERSIONS[-1], wheels.CACHE, python)) for python in ("3.11", "3.12"))
    assert len(one) > 1000
    assert one == other


def sources(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist() if entry.filename.endswith(".py")}


def test_a_version_from_before_is_refused(tmp_path):
    (tmp_path / "sglang").mkdir()
    with pytest.raises(AerieError, match=r"phase_profiler is for >=0.5.9, not for 0.5.8.post1"):
        planned(SourceTree.open(tmp_path, "sglang", "0.5.8.post1"), "phase_profiler")


# phase_profiler, as it is written


def has_v1(version: Version) -> bool:
    return version < Version.parse("0.5.13")


def decode_branches(tree: SourceTree, files: dict[str, bytes]) -> list[list[ast.stmt]]:
    workers = [(WORKER, "EAGLEWorkerV2"), *([(V1_WORKER, "EAGLEWorker")] if has_v1(tree.version) else [])]
    branches = []
    for file, name in workers:
        body = function(files[file], name, "forward_batch_generation").body
        (split,) = [statement for statement in body if isinstance(statement, ast.If)]
        branches.append(split.orelse)
    return branches


def test_the_v1_worker_is_profiled_in_every_version_that_has_it(pristine, profiled):
    assert (pristine.read(V1_WORKER) is not None) is has_v1(pristine.version) is (V1_WORKER in profiled)


def test_a_cycle_is_begun_and_ended_once_around_all_of_the_decode_branch(pristine, profiled):
    for branch in decode_branches(pristine, profiled):
        assert ast.unparse(branch[0]) in (f"{PROFILER}.begin(self, batch)", f"{PROFILER}.begin(self, model_worker_batch)")
        assert ast.unparse(branch[-2]) == f"{PROFILER}.end()"
        leaves = [node for statement in branch for node in ast.walk(statement) if isinstance(node, ast.Return)]
        assert leaves == [branch[-1]]


def test_the_draft_as_a_graph_is_marked_in_the_branch_that_runs_it(pristine, profiled):
    executes = "self.cuda_graph_runner." + ("replay" if pristine.version < Version.parse("0.5.14") else "execute")
    workers = [(WORKER, "EagleDraftWorker"), *([(V1_WORKER, "EAGLEWorker")] if has_v1(pristine.version) else [])]
    for file, name in workers:
        draft = function(profiled[file], name, "draft")
        (graph,) = [node for node in ast.walk(draft) if isinstance(node, ast.Call) and any(word.arg == "graph" for word in node.keywords)]
        (branch,) = [
            node
            for node in ast.walk(draft)
            if isinstance(node, ast.If) and graph in [child.value for child in node.body if isinstance(child, ast.Expr)]
        ]
        assert executes in [called for called, _ in calls(ast.Module(branch.body, []))]


def test_each_draft_step_begins_its_loop(pristine, profiled):
    workers = [(WORKER, "EagleDraftWorker"), *([(V1_WORKER, "EAGLEWorker")] if has_v1(pristine.version) else [])]
    for file, name in workers:
        (loop,) = [
            node
            for node in ast.walk(function(profiled[file], name, "draft_forward"))
            if isinstance(node, ast.For) and "speculative_num_steps" in ast.unparse(node.iter)
        ]
        assert ast.unparse(loop.body[0]) == f"{PROFILER}.draft_step({ast.unparse(loop.target)})"


def test_phases_of_the_v2_verification_are_in_the_order_of_the_work(pristine, profiled):
    if pristine.version < Version.parse("0.5.16"):
        verify, prefix = function(profiled[WORKER], "EAGLEWorkerV2", "verify"), "self."
    else:
        verify, prefix = function(profiled[COMMON], "run_eagle_verify"), ""
        assert [name for name, _ in calls(function(profiled[WORKER], "EAGLEWorkerV2", "verify"))] == ["run_eagle_verify"]
    method = pristine.version < Version.parse("0.5.14")
    prepare = "verify_input.prepare_for_v2_verify" if method else "eagle_prepare_for_verify"
    sample = "verify_input.sample" if method else "eagle_sample"
    target, finalize = f"{prefix}target_worker.forward_batch_generation", f"{prefix}_finalize_accept_tree_path"
    expected = ["kv", f"<{prepare}>", "target_verify", f"<{target}>", "tree_and_acceptance", f"<{sample}>"]
    if pristine.version >= Version.parse("0.5.13"):
        expected += ["kv", f"<{finalize}>"]
    assert marks(verify, prepare, target, sample, finalize) == expected


def test_phases_of_the_v1_verification_are_in_the_order_of_the_work(pristine, profiled):
    if not has_v1(pristine.version):
        return
    prepare, target, verify = "spec_info.prepare_for_verify", "self.target_worker.forward_batch_generation", "spec_info.verify"
    logprobs = "add_output_logprobs_for_spec_v1"
    expected = ["kv", f"<{prepare}>", "target_verify", f"<{target}>"]
    expected += ["tree_and_acceptance", f"<{verify}>", "tree_and_acceptance", f"<{logprobs}>"]
    assert marks(function(profiled[V1_WORKER], "EAGLEWorker", "verify"), prepare, target, verify, logprobs) == expected
    accept, free = "verify_tree_greedy_func", "token_to_kv_pool_allocator.free"
    info = marks(function(profiled[V1_INFO], "EagleVerifyInput", "verify"), accept, free)
    assert info[:3] == [f"<{accept}>", "kv", f"<{free}>"]


def test_the_profiler_is_imported_once_where_it_is_used(profiled):
    for source in profiled.values():
        assert source.decode().count(f"import {PROFILER}") == 1


# phase_profiler, as it runs


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run one decode cycle of a patched worker, and return its phases in order and the lines that were written."""
    monkeypatch.setenv("AERIE_PROFILE_DIR", str(tmp_path))
    (tmp_path / "on").write_text("1")  # every cycle
    spec = importlib.util.spec_from_file_location(PROFILER, OVERLAY)
    profiler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(profiler)
    moments = itertools.count(0, 1_000_000)
    monkeypatch.setattr(profiler.MonotonicClock, "now", staticmethod(lambda: next(moments)))
    order: list[str] = []
    enter = profiler.Cycle.enter

    def entered(cycle: Any, phase: str, step: int | None = None) -> None:
        order.append(phase if step is None else f"step {step}")
        enter(cycle, phase, step)

    monkeypatch.setattr(profiler.Cycle, "enter", entered)

    def run(files: dict[str, bytes], comparisons: bool = True, **how: Any) -> tuple[list[str], list[phases.Cycle]]:
        monkeypatch.setattr(worker_stubs.Anything, "comparisons", comparisons)
        order.clear()
        written = [file.read_text() for file in tmp_path.glob("phases-*.jsonl")]
        before = len(phases.read(written[0], "before")) if written else 0
        worker_stubs.run(files, profiler, **how)
        assert profiler._cycle is None, "a cycle is still open"
        written = [file.read_text() for file in tmp_path.glob("phases-*.jsonl")]
        return list(order), phases.read(written[0], "now")[before:] if written else []

    return run


DRAFT = ["remainder", "kv", "draft", "step 0", "step 1", "step 2", "tree_and_acceptance"]
GRAPH = ["remainder", "kv", "draft", "tree_and_acceptance"]
VERIFY = ["kv", "target_verify", "tree_and_acceptance"]
EXTEND = ["remainder", "draft_extend", "remainder"]


def kinds(version: Version) -> tuple[bool, ...]:
    """The workers of a version: v1 (true), v2."""
    return (True, False) if has_v1(version) else (False,)


def accepted(version: Version, v1: bool, tree: bool) -> list[str]:
    """What follows the acceptance: v1 frees KV in the middle of it, v2 moves KV where the draft may be a tree."""
    if v1:
        return ["kv", "tree_and_acceptance"]
    return ["kv"] if tree and version >= Version.parse("0.5.13") else []


def test_a_cycle_runs_through_its_phases_in_order_and_is_written_once(pristine, profiled, server):
    for v1 in kinds(pristine.version):
        for graph in (False, True):
            order, (line,) = server(profiled, v1=v1, graph=graph)
            assert order == [*(GRAPH if graph else DRAFT), *VERIFY, *accepted(pristine.version, v1, True), *EXTEND]
            assert (line.batch, line.steps, line.graph, len(line.draft_steps_ms)) == (3, 3, graph, 3)
            assert line.cycle_ms == len(order) == sum(line.phases.values())


def test_a_cycle_in_which_nothing_is_left_to_do_ends_too(pristine, profiled, server):
    for v1 in kinds(pristine.version):
        order, written = server(profiled, v1=v1, comparisons=False)
        end = ["remainder"] if v1 else EXTEND  # in v1 all requests are finished, so that there is no draft extend
        assert order == [*DRAFT, *VERIFY, *accepted(pristine.version, v1, False), *end]
        assert len(written) == 1


def test_a_cycle_without_a_draft_ends_too(pristine, profiled, server):
    if pristine.version < Version.parse("0.5.14"):
        return
    order, (line,) = server(profiled, v1=False, steps=0)
    assert order == ["remainder", *VERIFY, "kv", "remainder"]
    assert (line.steps, line.draft_steps_ms) == (0, ())


def test_a_draft_after_the_cycle_for_other_pipeline_stages_is_in_it(pristine, profiled, server):
    if pristine.version < Version.parse("0.5.21"):
        return
    order, (line,) = server(profiled, v1=False, tail=True)
    assert order == ["remainder", *VERIFY, "kv", *EXTEND, *DRAFT[1:]]
    assert len(line.draft_steps_ms) == 3


@pytest.mark.parametrize("mode", ["IDLE", "EXTEND"])
def test_idle_batches_and_prefills_are_no_cycles(pristine, profiled, server, mode):
    for v1 in kinds(pristine.version):
        assert server(profiled, v1=v1, mode=mode) == ([], [])


# A version that is adopted


def test_a_release_is_adopted_with_one_command(tmp_path, capsys):
    patches = tmp_path / "patches"
    for name in patch_sets.available():
        (patches / name).mkdir(parents=True)
        for part in ("patchset.yml", "overlay"):
            if (PATCHES / name / part).exists():
                (patches / name / part).symlink_to(PATCHES / name / part)
        committed = adopt_version.read_hashes(PATCHES, name)
        old = {version: committed[version] for version in committed if Version.parse(version) <= Version.parse("0.5.20")}
        adopt_version.write_hashes(patches, name, old)
    wheels.wheel("sglang", "0.5.20"), wheels.wheel("sglang", "0.5.23")
    options = ["0.5.23", "--patches", str(patches), "--wheels", str(wheels.CACHE)]
    assert adopt_version.main(options) == 0
    said = capsys.readouterr().out
    assert "SGLang 0.5.23 against 0.5.20" in said
    assert "phase_profiler: applies to 0.5.23: 15 hooks in 2 files" in said
    assert "appeared  speculative_draft_sink_size" in said
    assert "vanished  uno_tree.py" in said
    assert "VERSION=0.5.23 WRITE=1" in said
    assert max(map(len, said.splitlines())) <= adopt_version.WIDTH
    assert "0.5.23" not in adopt_version.read_hashes(patches, "phase_profiler")
    assert adopt_version.main([*options, "--write"]) == 0
    for name in patch_sets.available():
        assert adopt_version.read_hashes(patches, name).get("0.5.23") == adopt_version.read_hashes(PATCHES, name).get("0.5.23")
