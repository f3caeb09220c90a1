"""Plans prefills with SGLang's own code and FlashInfer's wrappers in our hands. Runs in a release's Python.

The release has the patch set flashinfer_prefill_plan. What the wrappers are given is compared with what they are given without it; it
fails where a value differs, where lengths are on the GPU that should be on the host, or where a case is taken that should be left alone.
"""

from __future__ import annotations

import ast
import functools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang
import torch
from sglang.srt.layers.attention import aerie_flashinfer_prefill_plan as ours

BACKEND = Path(sglang.__file__).parent / "srt/layers/attention/flashinfer_backend.py"
CLASS = "FlashInferIndicesUpdaterPrefill"
METHODS = ("update_single_wrapper", "call_begin_forward")
ROWS = 16


class There(torch.Tensor):
    """A tensor that stands for one on a GPU: what is computed of it is there too."""


def there(values: Any) -> Any:
    return torch.as_tensor(values).as_subclass(There)


class Wrapper:
    """One of FlashInfer's: it keeps what it is planned with."""

    def __init__(self, backend: str = "auto", *, is_graph: bool = False) -> None:
        self._backend, self.is_cuda_graph_enabled = backend, is_graph
        self.device = torch.device("cpu")
        self.planned: list[tuple[Any, ...]] = []

    def begin_forward(self, *given: Any, **named: Any) -> None:
        kept = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
        self.planned.append((kept, named))


@functools.cache
def updater_class() -> Any:
    """Return SGLang's class with the two methods alone, with the hooks in them; nothing else of its module is imported."""
    tree = ast.parse(BACKEND.read_text())
    (node,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == CLASS)
    node.body = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in METHODS]
    for method in node.body:
        method.returns = None
        for one in [*method.args.args, *method.args.kwonlyargs]:
            one.annotation = None
    scope: dict[str, Any] = {"torch": torch, "aerie_flashinfer_prefill_plan": ours, "fast_prefill_plan": None}
    scope |= {"IdSpaceKind": SimpleNamespace(FULL=0, SLIDING_WINDOW=1), "SpecInput": Speculation}
    scope |= {"SpecInputType": SimpleNamespace(DFLASH_VERIFY="dflash", EAGLE_VERIFY="eagle")}
    exec(compile(ast.Module([node], []), str(BACKEND), "exec"), scope)
    return scope[CLASS]


def updater() -> Any:
    made = updater_class().__new__(updater_class())
    made.num_qo_heads, made.num_kv_heads, made.head_dim, made.q_data_type, made.data_type = 32, 8, 128, "bf16", "bf16"
    made.kv_last_page_len = there(torch.ones(ROWS, dtype=torch.int32))
    made.kv_indptr, made.qo_indptr = ([there(torch.zeros(ROWS + 1, dtype=torch.int32))] for _ in range(2))
    made.req_to_token = torch.zeros((ROWS, 8), dtype=torch.int32)
    translator = SimpleNamespace(reads_are_translated=False, pack_read_stream=lambda *given, **named: None)
    made.attn_backend = SimpleNamespace(kv_index_translator=translator, dq_paged_kernel_lens=None)
    return made


def planned(how: str, lengths: list[int], prefixes: list[int], *, is_ragged: bool, wrapper: Any = Wrapper, **named: Any) -> tuple[Any, Any]:
    """Have a prefill planned, and return both wrappers."""
    ours.HOW = how
    one = updater()
    one.prefill_wrapper_ragged, paged = wrapper(), wrapper()
    known = {"seq_lens_cpu": torch.tensor(lengths), "extend_prefix_lens_cpu": prefixes, "spec_info": None, **named}
    one.update_single_wrapper(
        torch.arange(len(lengths)),
        there(lengths),
        known.pop("seq_lens_cpu"),
        sum(lengths),
        there(prefixes),
        [paged],
        is_ragged,
        None,
        known.pop("spec_info"),
        plan=None,
        **known,
    )
    assert ours.noted is None
    return one.prefill_wrapper_ragged, paged


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.tolist() == other.tolist()
    return bool(one == other)


def on_host(wrapper: Wrapper) -> list[bool]:
    """Say of each tensor but the slots (the third of a paged wrapper's) whether it is on the host."""
    tensors = [one for given, _ in wrapper.planned for place, one in enumerate(given) if place != 2 and torch.is_tensor(one)]
    return [not isinstance(one, There) for one in tensors]


def refusal() -> str:
    """Return what is said of lengths on the host that are not those on the GPU."""
    try:
        planned(ours.CHECK, [5, 9], [0, 3], is_ragged=True, seq_lens_cpu=torch.tensor([5, 10]))
    except AssertionError as error:
        return str(error)
    return "nothing"


def order_of_two_plans() -> list[str]:
    """Return what happens when a GPU's wrapper plans twice: what a plan is copied from is not written before the copy is over."""
    happened: list[str] = []

    class Event:
        def record(self) -> None:
            happened.append("copied later")

        def synchronize(self) -> None:
            happened.append("waits for the copy")

    class OfGpu(Wrapper):
        def begin_forward(self, *_given: Any, **_named: Any) -> None:
            happened.append("plans")

    wrapper, event = OfGpu(), torch.cuda.Event
    wrapper.device = torch.device("cuda")
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    try:
        for _ in range(2):
            ours.RaggedPlanner(wrapper, *(torch.tensor([0, 1]) for _ in range(3))).begin_forward(there([0, 1]), there([0, 1]))
    finally:
        torch.cuda.Event = event  # type: ignore[misc]
    return happened


def main() -> None:
    chance = random.Random(1)
    taken = 0
    for _ in range(200):
        prefixes = [chance.choice((0, chance.randint(1, 900))) for _ in range(chance.randint(1, ROWS))]
        lengths = [prefix + chance.choice((1, chance.randint(2, 700))) for prefix in prefixes]
        is_ragged = chance.random() < 0.7
        for how in (ours.HOST, ours.CHECK):
            without, with_lengths = (planned(one, lengths, prefixes, is_ragged=is_ragged) for one in ("", how))
            for theirs, mine, count in zip(without, with_lengths, (2 * is_ragged, 3), strict=True):
                assert on_host(theirs) == [False] * count, "these stand for a GPU's"
                assert on_host(mine) == [True] * count
                for (given, named), (known, also) in zip(theirs.planned, mine.planned, strict=True):
                    slots = 2 if count == 3 else None
                    assert named == also
                    assert all(same(a, b) for place, (a, b) in enumerate(zip(given, known, strict=True)) if place != slots)
                taken += 1
    left_alone = {
        "without the variable": {"how": ""},
        "of speculation": {"spec_info": Speculation()},
        "lengths that the host does not know": {"seq_lens_cpu": None},
        "prefixes that the host does not know": {"extend_prefix_lens_cpu": None},
        "lengths of fewer requests": {"seq_lens_cpu": torch.tensor([5])},
        "nothing to compute": {"extend_prefix_lens_cpu": [5, 3]},
        "a backend that plans on the GPU": {"wrapper": lambda: Wrapper("cutlass")},
        "a graph's": {"wrapper": lambda: Wrapper(is_graph=True)},
        "a cache with indices of its own": {"custom_kv_indices": there([1, 2, 3])},
    }
    for name, changed in left_alone.items():
        case: dict[str, Any] = {"how": ours.HOST, **changed}
        for wrapper in planned(case.pop("how"), [5, 9], [0, 3], is_ragged=True, **case):
            assert not any(on_host(wrapper)), name
    if (said := refusal()) != "lengths to plan with are [0, 5, 11], and not [0, 5, 12]":
        sys.exit(f"lengths that differ: {said}")
    order = order_of_two_plans()
    assert order == ["plans", "copied later", "waits for the copy", "plans", "copied later"], order
    print(f"{taken} plans with lengths of the host, {len(left_alone)} cases left alone")


class Speculation:
    spec_input_type, num_tokens_per_req = "other", None

    def generate_attn_arg_prefill(self, *_given: Any, **_named: Any) -> tuple[Any, ...]:
        return there([0]), there([0, 5, 9]), there([0, 1, 2]), None


if __name__ == "__main__":
    main()
