"""Runs the decode cycle of a patched EAGLE worker: its own code, with stand-ins for all that the code uses."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

SPECULATIVE = "sglang/srt/speculative/"


class Anything:
    """Whatever is called on it, taken from it or computed with it is anything again; compared, it is as ``comparisons`` says."""

    comparisons = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "is_idle":
            return lambda: False
        return Shape() if name == "shape" else Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 3

    def __int__(self) -> int:
        return 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass

    def __instancecheck__(self, _instance: object) -> bool:
        return True

    def _anything(self, *_arguments: Any, **_named: Any) -> Any:
        return Anything()

    def _compared(self, _other: object) -> bool:
        return Anything.comparisons

    __call__ = __getitem__ = _anything
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = __neg__ = __invert__ = _anything
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __hash__ = object.__hash__


class Shape(Anything):
    """That of a matrix."""

    def __iter__(self) -> Iterator[Any]:
        return iter((Anything(), Anything()))


class Mode:
    """A forward mode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "IDLE"

    def is_extend(self) -> bool:
        return self.name == "EXTEND"


class Modes(Anything):
    def __getattr__(self, name: str) -> Any:
        return Mode(name)


class Unpacking(ast.NodeTransformer):
    """Lets ``a, b = <anything>`` have as many values as it has names."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and not isinstance(node.value, ast.Tuple):
            names = ast.Tuple([ast.Constant(ast.unparse(name)) for name in target.elts], ast.Load())
            node.value = ast.Call(ast.Name("unpacked", ast.Load()), [node.value, names], [])
        return node


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def functions(source: bytes, path: list[str], names: list[str], given: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions ``names`` of the class at ``path`` (of the module without one); ``given`` are values of what they name."""
    body: list[ast.stmt] = ast.parse(source).body
    for name in path:
        (body,) = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    kept = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert sorted(node.name for node in kept) == sorted(names)
    for node in kept:
        node.decorator_list = []
    module = ast.fix_missing_locations(Unpacking().visit(ast.Module(list(kept), [])))
    # Without asserts: they are about the stand-ins.
    code = compile(module, path[-1] if path else "module", "exec", flags=annotations.compiler_flag, optimize=1)
    used = {name for part in codes(code) for name in part.co_names if not hasattr(builtins, name)}

    def unpacked(value: Any, targets: tuple[str, ...]) -> list[Any]:
        values = list(value) if isinstance(value, tuple) else [Anything() for _ in targets]
        return [given.get(name, one) for name, one in zip(targets, values, strict=True)]

    environment = {**{name: Anything() for name in used}, "ForwardMode": Modes(), **given, "unpacked": unpacked}
    exec(code, environment)
    return {name: environment[name] for name in names}


def stand_in(name: str, methods: Mapping[str, Any], **attributes: Any) -> Any:
    made = type(name, (Anything,), dict(methods))()
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def run(
    files: Mapping[str, bytes], profiler: Any, *, v1: bool, mode: str = "DECODE", steps: int = 3, graph: bool = False, tail: bool = False
) -> None:
    """Call ``forward_batch_generation`` of the worker v1 or v2 in ``files`` once, with three requests.

    ``graph``: the draft runs as one. ``tail``: the last of several pipeline stages, where a draft was made by the cycle before.
    """
    given: dict[str, Any] = {"aerie_phase_profiler": profiler, "can_cuda_graph": graph, "can_run_decode_cuda_graph": graph}
    batch = stand_in("Batch", {}, forward_mode=Mode(mode), is_extend_in_batch=False)
    batch.spec_info = stand_in("Input", {}, is_verify_input=lambda: tail)
    common = {"device": "cpu", "tp_rank": 0, "speculative_num_steps": steps}
    if v1:
        verify = functions(files[f"{SPECULATIVE}eagle_info.py"], ["EagleVerifyInput"], ["verify"], given)
        made = stand_in("EagleVerifyInput", verify)
        given["EagleVerifyInput"] = stand_in("EagleVerifyInputs", {"__call__": lambda *_, **__: made, "create_idle_input": lambda *_: made})
        names = ["forward_batch_generation", "draft", "draft_forward", "verify"]
        worker = stand_in("EAGLEWorker", functions(files[f"{SPECULATIVE}eagle_worker.py"], ["EAGLEWorker"], names, given), **common)
        worker.server_args = stand_in("ServerArgs", {}, enable_dp_attention=False)
        worker.cuda_graph_runner = stand_in("Runner", {}, can_run=lambda _batch: graph)
        worker.forward_batch_generation(batch)
        return
    source = files[f"{SPECULATIVE}eagle_worker_v2.py"]
    if shared := files.get(f"{SPECULATIVE}eagle_worker_common.py"):
        given |= functions(shared, [], ["run_eagle_verify"], given)
    given["get_parallel"] = lambda: stand_in("Parallel", {}, pp_size=2 if tail else 1)
    methods = functions(source, ["EAGLEWorkerV2"], ["forward_batch_generation", "verify"], given)
    drafts = functions(source, ["EagleDraftWorker"], ["draft", "draft_forward"], given)
    worker = stand_in("EAGLEWorkerV2", methods, **common)
    worker.draft_worker = stand_in("EagleDraftWorker", drafts, speculative_num_steps=steps)
    worker.target_worker = stand_in("TpModelWorker", {}, tp_rank=0)
    worker.forward_batch_generation(batch)
