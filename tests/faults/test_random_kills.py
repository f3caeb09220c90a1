"""Real SIGKILLs at random times, one after the other on one tree, leave exactly one of the states that were asked for."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from ansible.module_utils.aerie.patching import patch_plan, patch_transaction
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from package import ANEW, NARROW, WIDE, Site, ideal, import_error, visible

STATES = ((), (WIDE,), (NARROW,), (WIDE, NARROW), (ANEW,))
ROUNDS, SLICE = 200, 20


def killed_after(seconds: float, function) -> bool:
    """Run ``function`` in a child that is killed after ``seconds``; say whether it was, rather than that it had ended."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class Times:
    """Random times to kill at, spread over how long a run takes: less when one had ended before, more when one had not."""

    def __init__(self, dice: random.Random, longest: float) -> None:
        self.dice, self.longest = dice, longest

    def kill(self, function) -> bool:
        killed = killed_after(self.dice.uniform(0, self.longest), function)
        self.longest *= 1.02 if killed else 0.9
        return killed


def duration(function) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def test_random_kills_of_random_operations_in_a_row(tmp_path, everything, count):
    site = Site(tmp_path)
    seed = random.randrange(10**9)
    dice = random.Random(seed)
    longest = max(duration(lambda one=one: site.apply(*one)) for one in (*STATES, ()))
    times, kills, before = Times(dice, longest), 0, ()
    while kills < (ROUNDS if everything else SLICE):
        wanted = dice.choice([one for one in STATES if one != before])
        kills += times.kill(lambda one=wanted: site.apply(*one))
        told = f"seed {seed}, kill {kills}"
        found = [one for one in STATES if site.content == ideal(one)[0]]
        assert found, told
        assert import_error(site) == "", told
        planned = site.plan(*wanted)
        if planned.interrupted is None:
            assert [one["name"] for one in planned.applied_before] == [one.name for one in found[0]], told
        before = found[0]
    site.assert_goes_on(WIDE, NARROW)
    count |= {"kills": kills}


def test_random_kills_on_the_real_package(tmp_path, everything, count):
    import wheels

    from aerie_controller import patch_sets

    site_packages = wheels.unpack("sglang", "0.5.23", tmp_path / "site-packages")
    profiler = patch_sets.load(["phase_profiler"])
    tree = SourceTree.open(site_packages, "sglang")
    store = PatchStore.beside(tree, tmp_path / "store")

    def go(sets) -> None:
        with store.locked():
            patch_transaction.apply(tree, store, patch_plan.plan(tree, store, sets))

    def content():
        return visible(tree.path / "sglang")

    first = duration(lambda: go(profiler))
    new = content()
    longest = max(first, duration(lambda: go([])))
    old = content()
    for name, (data, _) in (old | new).items():
        if name.endswith(".py") and old.get(name) != new.get(name):
            compile(data, name, "exec", dont_inherit=True)
    times, kills = Times(random.Random(), longest), 0
    for wanted, state in ((profiler, new), ([], old)):
        done = 0
        while done < (10 if everything else 1):
            go([] if wanted else profiler)
            done += times.kill(lambda one=wanted: go(one))
            found = content()
            assert found in (old, new)
            go(wanted)
            assert content() == state
            assert store.journal() is None
            assert not patch_plan.plan(tree, store, wanted).changed
            assert list(tree.path.rglob(".*aerie*")) == []
        kills += done
    count |= {"kills": kills}


@pytest.mark.parametrize("sets", STATES, ids=lambda sets: "+".join(one.name for one in sets) or "none")
def test_each_state_that_is_compared_with_imports(tmp_path, sets):
    site = Site(tmp_path)
    site.apply(*sets)
    assert import_error(site) == ""
