"""Parsers of what tools print and of what people write, with inputs that nobody thought of: an answer or a report, never a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie import settings
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import dpkg, driver, gpus, pci, pci_config
from ansible.module_utils.aerie.measuring import bench_clients, experiment
from ansible.module_utils.aerie.patching.patch_set import PatchSet
from ansible.module_utils.aerie.serving import server_metrics
from ansible.module_utils.aerie.specifiers import Specifier, Version
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from aerie_controller import patch_sets

EXAMPLES = 150
tried = hypothesis_settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))

WORDS = (
    *("Inst", "Conf", "Remv", "Package:", "Version:", "[1.2.3]", "(1.2-3", "amd64", "ii ", "|", "\t", "NVRM: Xid (PCI:0000:01:00):"),
    *("79,", "pid=1", "0000:01:00.0", "Slot:\t", "Class:\t0302", "LnkSta:", "Speed 16GT/s", "0-3,8", "-", ",", "# TYPE", '{a="b"}'),
    *("1e400", "NaN", "sglang:spec_accept_length", "\0", "\x1b[31m", "𝟛", "٣", "==", "~=1.0", "!=", "*", "post1", "rc", "+cu130"),
)
"""What the parsers look for, and digits that are none to a machine."""
TEXT = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=12), st.just("\n"), st.integers().map(str)), max_size=30).map("".join)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(WORDS)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=12), inner, max_size=4)),
    max_leaves=12,
)


PARSERS: dict[str, Callable[[str], Any]] = {
    "lspci": pci.parse_lspci,
    "dpkg": lambda text: dpkg.parse_packages(text, "amd64"),
    "apt's simulation": dpkg.parse_simulation,
    "apt-cache madison": dpkg.parse_madison,
    "an upstream version": dpkg.upstream,
    "two versions": lambda text: dpkg.compare(text, text[::-1]),
    "a version that is wanted": lambda text: dpkg.matches(text, text[:3]),
    "the kernel's log": driver.parse_xids,
    "a GPU's name": gpus.sku,
    "a bus address": gpus.address,
    "metrics": server_metrics.counters,
    "metrics before and after": lambda text: server_metrics.delta(text, text[::-1]),
    "PCI configuration space": lambda text: pci_config.parse_config(text.encode()),
    "a version": Version.parse,
    "versions": Specifier.parse,
}


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS)
def test_what_a_tool_prints_is_read_or_reported(parse):
    @tried
    @given(TEXT)
    def holds(text: str) -> None:
        with contextlib.suppress(AerieError):
            parse(text)

    holds()


def mutated(value: Any, chance: st.DataObject) -> Any:
    """Return ``value`` with one of its parts replaced by anything, or left out."""
    if isinstance(value, dict) and value and chance.draw(st.booleans()):
        key = chance.draw(st.sampled_from(sorted(value, key=str)))
        if chance.draw(st.integers(0, 4)) == 0:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: mutated(value[key], chance)}
    if isinstance(value, list) and value and chance.draw(st.booleans()):
        place = chance.draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutated(value[place], chance), *value[place + 1 :]]
    return chance.draw(JSON)


ROOT = Path(__file__).parents[2]
ARMS = {"baseline": {"speculation": None}, "eagle3-3": {"speculation": {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3}}}
INSTANCES = {"main": {"arm": "baseline", "model": "target", "port": 30000, "gpus": [0]}}
RESULT = {"completed": 3, "duration": 1.5, "total_output_tokens": 96, "ttfts": [0.1], "itls": [[0.1]], "errors": [""]}
SHIPPED = patch_sets.load(["triton_target_verify"])[0].shipped


def mapping(data: Any) -> dict[str, Any]:
    """Return what is a table, as its reader sees to it before."""
    return data if isinstance(data, dict) else {}


DATA: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "an experiment": (
        yaml.safe_load((ROOT / "experiments/demo.yml").read_text()),
        lambda data: experiment.validate(data, ["baseline", "eagle3"], ["main"]),
    ),
    "arms": (ARMS, lambda data: list(settings.check_arms(mapping(data), ["draft"]))),
    "instances": (INSTANCES, lambda data: list(settings.check_instances(mapping(data), ARMS, ["target"]))),
    "ports": (INSTANCES, lambda data: list(settings.check_ports(mapping(data)))),
    "flags": ({"tp_size": 8}, lambda data: list(settings.check_flags("flags", data))),
    "an environment": ({"NCCL_ALGO": "Ring"}, lambda data: list(settings.check_environment("environment", data))),
    "a patch set": (SHIPPED["definition"], lambda data: PatchSet.of(SHIPPED | {"definition": data})),
    "a client's result": (RESULT, lambda data: bench_clients.metrics(mapping(data))),
}


@pytest.mark.parametrize("name", DATA)
def test_what_people_and_programs_write_is_read_or_reported(name):
    right, read = DATA[name]
    read(right)

    @tried
    @given(st.data())
    def holds(chance: st.DataObject) -> None:
        with contextlib.suppress(AerieError):
            read(mutated(right, chance))

    holds()
