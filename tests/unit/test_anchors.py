"""anchors finds the one place that a hook means, inserts whole lines there, and says why it can't."""

from __future__ import annotations

import re

import pytest
from ansible.module_utils.aerie.patching import anchors
from ansible.module_utils.aerie.patching.patch_set import Hook, Step
from ansible.module_utils.aerie.specifiers import Specifier

SOURCE = '''\
"""A worker."""

from __future__ import annotations

import torch  # the last import


class Worker:
    """It works."""

    def step(self, batch, *, more=None):
        """One step."""
        # a comment stays above
        if batch.extend:
            return self.prefill(batch)
        else:
            with context():
                out = self.verify(
                    batch,
                )
            for number in range(self.steps):
                self.draft(number)
            return out

    def prefill(self, batch):
        return self.verify(batch)


class Other:
    def step(self):
        x = self.go(); y = 1
        if x: self.now()
        if x:
            pass
        elif y:
            self.later()
        return self.verify(x) or self.verify(y)


def bare():
    """Only a docstring."""
'''


def hook(
    at: str = "", *, call: str | None = None, where: str = "before", insert: str = "mark()", imports: str | None = None, name: str = "h"
) -> Hook:
    """``at`` is written as ``class Worker/function step``."""
    steps = tuple(Step(*step.split(" ", 1)) for step in at.split("/") if step)
    return Hook(name, "w.py", steps, call, where, insert, imports, Specifier("", ()))


def inserted(*hooks: Hook, source: str = SOURCE) -> list[tuple[str, str]]:
    """Return (inserted line, the line that follows it) for each."""
    derived, problems = anchors.derive(source.encode(), hooks, "w.py")
    assert problems == []
    lines = derived.data.decode().split("\n")
    added = {line for one in derived.insertions for line in one.text.decode().split("\n") if line}
    return [(line, lines[number + 1]) for number, line in enumerate(lines) if line in added]


def problem(one: Hook, source: str = SOURCE) -> str:
    derived, problems = anchors.derive(source.encode(), [one], "w.py")
    assert derived is None
    (message,) = problems
    return message


STEP = "class Worker/function step"


@pytest.mark.parametrize(
    ("one", "line", "following"),
    [
        (hook(STEP, where="start"), "        mark()", "        if batch.extend:"),
        (hook(f"{STEP}/branch if", where="start"), "            mark()", "            return self.prefill(batch)"),
        (hook(f"{STEP}/branch else", where="start"), "            mark()", "            with context():"),
        (hook(f"{STEP}/branch else", where="end"), "            mark()", "            return out"),
        (hook(f"{STEP}/loop for", where="start"), "                mark()", "                self.draft(number)"),
        (hook(f"{STEP}/loop range(self.steps)", where="end"), "                mark()", "            return out"),
        (hook(STEP, call="self.verify"), "                mark()", "                out = self.verify("),
        (hook(STEP, call="self.verify", where="after"), "                mark()", "            for number in range(self.steps):"),
        (hook(STEP, call="context"), "            mark()", "            with context():"),
        (hook(STEP, call="context", where="after"), "            mark()", "            for number in range(self.steps):"),
        (hook("class Other/function step", call="self.verify"), "        mark()", "        return self.verify(x) or self.verify(y)"),
        (hook("class Worker", where="start"), "    mark()", "    def step(self, batch, *, more=None):"),
        (hook("function bare", where="start"), "    mark()", ""),
    ],
)
def test_lines_land_where_the_hook_says(one, line, following):
    assert inserted(one) == [(line, following)]


def test_placeholders_become_the_names_in_the_source():
    one = hook(f"{STEP}/loop for", where="start", insert="mark({param[1]}, {target}, {'a': 1})")
    assert inserted(one)[0][0].strip() == "mark(batch, number, {'a': 1})"


def test_an_import_goes_after_the_last_one_and_once():
    hooks = [hook(STEP, where="start", imports="import marks"), hook(STEP, call="self.verify", imports="import marks")]
    assert inserted(*hooks)[0] == ("import marks", "")
    assert sum(line == "import marks" for line, _ in inserted(*hooks)) == 1


@pytest.mark.parametrize(
    ("source", "line"),
    [('"""Doc."""\nx = f()\n', 1), ("#!/bin/python\nx = f()\n", 1), ('"""Doc."""\nfrom __future__ import annotations\nx = f()\n', 2)],
)
def test_without_imports_an_import_goes_after_what_must_be_first(source, line):
    derived, _ = anchors.derive(source.encode(), [hook(call="f", imports="import marks")], "w.py")
    assert derived.data.decode().split("\n")[line] == "import marks"


def test_at_one_place_lines_come_innermost_first_and_then_in_the_order_given():
    hooks = [
        hook(STEP, call="self.draft", insert="before_draft()"),
        hook(STEP, call="context", where="after", insert="outer()"),
        hook(STEP, call="self.verify", where="after", insert="inner_1()"),
        hook(STEP, call="self.verify", where="after", insert="inner_2()"),
        hook(STEP, call="range", insert="before_loop()"),
    ]
    assert [line.strip() for line, _ in inserted(*hooks)] == ["inner_1()", "inner_2()", "outer()", "before_loop()", "before_draft()"]


def test_several_lines_keep_their_shape():
    one = hook(STEP, where="start", insert="if more:\n    a()\n\nb()")
    derived, _ = anchors.derive(SOURCE.encode(), [one], "w.py")
    assert derived.insertions[0].text == b"        if more:\n            a()\n\n        b()\n"


@pytest.mark.parametrize(
    "source",
    [
        SOURCE.encode(),
        SOURCE.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + SOURCE.encode(),
        SOURCE.replace("One step", "Ein Schritt – ünïcödé").encode(),
        SOURCE.replace("    ", "\t").encode(),
        SOURCE.rstrip("\n").encode(),
    ],
    ids=["plain", "CRLF", "BOM", "UTF-8", "tabs", "no newline at the end"],
)
def test_every_other_byte_stays(source):
    hooks = [
        hook(STEP, where="start", imports="import marks"),
        hook(STEP, call="self.verify", where="after"),
        hook("function bare", where="end"),
    ]
    derived, problems = anchors.derive(source, hooks, "w.py")
    assert problems == []
    rest, shift = derived.data, 0
    for one in derived.insertions:
        start = one.offset + shift
        assert rest[start : start + len(one.text)] == one.text
        rest = rest[:start] + rest[start + len(one.text) :]
    assert rest == source
    assert len(derived.insertions) == 4
    endings = {line[len(line.rstrip(b"\r\n")) :] for line in derived.data.splitlines(keepends=True)} - {b""}
    assert len(endings) == 1
    assert derived.data.endswith(b"\n") == source.endswith(b"\n")


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (hook("class Wroker", where="start"), "class 'Wroker' in the module, but it has none; did you mean 'Worker'"),
        (hook("class Worker/function go", call="x"), "function 'go' in class Worker, but it has none"),
        (hook("function step", where="start"), r"there is Worker.step \(line 11\) and Other.step"),
        (hook(STEP, call="self.verfy"), "calls 'self.verfy' in Worker.step, but it has none; did you mean 'self.verify'"),
        (hook(STEP, call="self.go"), r"it is called in Other.step \(line 31\)"),
        (hook("class Worker/function prefill/branch else", where="start"), "the only top-level if of Worker.prefill, but it has none"),
        (hook("class Other/function step/branch else", where="start"), r"it has 2 \(lines 32 and 33\)"),
        (hook(f"{STEP}/loop while", where="start"), "loop 'while' in Worker.step, but it has none"),
        (hook(f"{STEP}/loop range(self.step)", where="start"), "did you mean 'range\\(self.steps\\)'"),
        (hook(STEP, call="self.prefill", where="after"), "nothing runs after the statement in line 15"),
        (hook("class Other/function step", call="self.go", where="after"), "line 31 goes on after the statement"),
        (hook("class Other/function step", call="self.now"), "the statement in line 32 does not begin its line"),
        (hook(STEP, where="start", insert="mark({param[2]})"), "step has only the parameters self and batch"),
        (hook(STEP, where="start", insert="mark({target})"), "is no for loop"),
        (hook(STEP, where="start", insert="mark("), "no valid Python"),
    ],
)
def test_what_has_no_one_place_is_refused_with_near_matches(one, message):
    assert re.search(message, problem(one))


def test_places_are_told_one_by_one_also_where_others_are_missing():
    there, gone = hook("class Worker/function step", call="self.verify"), hook("class Worker/function step", call="self.verfy", name="gone")
    (_, line), (_, problem) = anchors.locate(SOURCE.encode(), [there, gone])
    assert line == 1 + SOURCE[: SOURCE.index("out = self.verify(")].count("\n")
    assert "looked for the only statement that calls 'self.verfy'" in str(problem)
    assert "did you mean 'self.verify'" in str(problem)


def test_a_call_that_is_there_twice_is_refused():
    source = "def f():\n    g()\n    if g():\n        pass\n"
    assert "2 (lines 2 and 3)" in problem(hook("function f", call="g"), source)


def test_an_elif_is_no_else_and_no_place_for_a_line():
    source = "def f(x):\n    if x:\n        pass\n    elif g():\n        pass\n"
    assert "has an elif" in problem(hook("function f/branch else", where="start"), source)
    assert "does not begin its line" in problem(hook("function f", call="g"), source)


def test_calls_in_nested_functions_are_not_in_scope():
    source = "def f():\n    def inner():\n        g()\n    g()\n"
    assert inserted(hook("function f", call="g"), source=source) == [("    mark()", "    g()")]


def test_all_problems_are_told_at_once():
    _, problems = anchors.derive(
        SOURCE.encode(), [hook("class A", where="start", name="a"), hook("class B", where="start", name="b")], "w.py"
    )
    assert [message.partition(": looked")[0] for message in problems] == ["w.py: hook 'a'", "w.py: hook 'b'"]


def test_an_original_that_is_no_python_is_refused():
    assert "not Python that this interpreter reads" in problem(hook(STEP, where="start"), "def f(:\n")
