"""Killed at any system call, or told by any that it failed, a run leaves the old tree or the new one, and the next run ends clean."""

from __future__ import annotations

import errno
import os

import pytest
import stepping
from package import WAYS, Site, ideal, import_error

SLICE = 6


def calls_of(site: Site, wanted, everything: bool) -> list[stepping.Call]:
    """The system calls of a run to ``wanted``; of the slice, some that change or sync files, from the first to the last."""
    ended = stepping.run(lambda: site.apply(*wanted))
    assert (ended.killed, ended.status, ended.error) == (False, 0, "")
    changing = [call for call in ended.calls if call.changes]
    return list(ended.calls) if everything else [changing[round(at * (len(changing) - 1) / (SLICE - 1))] for at in range(SLICE)]


@pytest.mark.parametrize("start", list(WAYS))
def test_killed_at_any_system_call(site, memory, way, start, everything, count):
    start, wanted = WAYS[start]
    if start:
        site.apply(*start)
    site.copy_to(memory / "template")
    calls = calls_of(site, wanted, everything)
    # After one call is before the next: each state is gone on from in both directions.
    trials = [(call, moment) for call in calls for moment in (("before", "after") if call.changes else ("before",))]
    seen = set()
    for call, moment in trials:
        site.restore_from(memory / "template")
        ended = stepping.run(lambda: site.apply(*wanted), kill=(call.number, moment))
        told = f"{moment} {call}"
        assert ended.killed, told
        content = site.content
        if way == "exchanged":
            assert content in (ideal(start)[0], ideal(wanted)[0]), told
        else:
            each = [{one.get(name) for one in (ideal(start)[0], ideal(wanted)[0])} for name in content]
            assert all(found in either for found, either in zip(content.values(), each, strict=True)), told
            assert ideal(start)[0].keys() & ideal(wanted)[0].keys() <= content.keys(), told
        assert import_error(site) == "", told
        seen.add(tuple(sorted(content.items())))
        if not call.changes:
            continue  # what is there to go on from was tried at the last call that changed something
        try:
            site.assert_goes_on(*(wanted if moment == "after" else start))
        except Exception as error:
            error.add_note(told)
            raise
    assert len(seen) >= 2
    count |= {"boundaries": len(calls), "kills": len(trials)}


@pytest.mark.parametrize("start", list(WAYS))
def test_killed_at_any_system_call_of_undoing(site, memory, way, start, everything, count):
    start, wanted = WAYS[start]
    if start:
        site.apply(*start)

    stepping.run(lambda: site.apply(*wanted, verify=lambda: os._exit(0)))
    assert site.store.journal() is not None
    site.copy_to(memory / "template")
    calls = calls_of(site, start, everything)
    for call in calls:
        site.restore_from(memory / "template")
        ended = stepping.run(lambda: site.apply(*start), kill=(call.number, "after"))
        assert ended.killed, call
        if way == "exchanged":
            assert site.content in (ideal(start)[0], ideal(wanted)[0]), call
        assert import_error(site) == "", call
        if not call.changes:
            continue
        site.assert_goes_on(*(wanted if call.number % 2 else start))
    count |= {"boundaries": len(calls), "kills": len(calls)}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("start", list(WAYS))
def test_told_by_any_system_call_that_it_failed(site, memory, way, start, error, everything, count):
    start, wanted = WAYS[start]
    if start:
        site.apply(*start)
    site.copy_to(memory / "template")
    injected = 0
    for call in [call for call in calls_of(site, wanted, everything) if call.changes]:
        site.restore_from(memory / "template")
        ended = stepping.run(lambda: site.apply(*wanted), fail=stepping.Fault(call.number, error))
        injected += 1
        told = f"{call}: {ended.error}"
        assert not ended.killed, told
        if ended.status == 0:
            site.assert_clean(*wanted)
            continue
        assert ended.error.startswith("AerieError: ") and len(ended.error.splitlines()) <= 2, told
        assert os.strerror(error) in ended.error and (str(site.path) in ended.error or str(site.store_path) in ended.error), told
        if "everything was applied" in ended.error:
            assert site.content == ideal(wanted)[0], told
        else:
            assert site.content == ideal(start)[0], told
            try:
                site.assert_clean(*start)
            except AssertionError as failure:
                failure.add_note(told)
                raise
        site.assert_goes_on(*wanted)
    count |= {"injected errors": injected}


@pytest.mark.parametrize("start", list(WAYS))
def test_the_disk_goes_away_at_any_system_call_and_comes_back(site, memory, way, start, everything, count):
    start, wanted = WAYS[start]
    if start:
        site.apply(*start)
    site.copy_to(memory / "template")
    calls = [call for call in calls_of(site, wanted, everything) if call.changes]
    for call in calls:
        site.restore_from(memory / "template")
        ended = stepping.run(lambda: site.apply(*wanted), fail=stepping.Fault(call.number, errno.EIO, lasting=True))
        told = f"{call}: {ended.error}"
        assert ended.status == 1 and ended.error.startswith("AerieError: "), told
        assert os.strerror(errno.EIO) in ended.error, told
        if way == "exchanged":
            assert site.content in (ideal(start)[0], ideal(wanted)[0]), told
        assert import_error(site) == "", told
        site.assert_goes_on(*(wanted if call.number % 2 else start))
    count |= {"injected errors": len(calls)}
