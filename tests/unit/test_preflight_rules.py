"""Rules find each sickness of a host and nothing on a healthy one, say what is not known, and are read strictly."""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie import words
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import host_info, tuning_settings

from aerie_controller.preflight import pains, rules, schema

PROJECT = Path(__file__).parents[2]
HOSTS = PROJECT / "tests/fixtures/hosts"
HEALTHY = "rtx-pro-6000"
ROOT, MODEL = "/data/aerie", "/data/models/Kimi-K2.5"
WANT = {
    "profile": "cuda",
    "root": ROOT,
    "version": None,
    "driver_version": None,
    "instances": {"main": {"arm": "eagle3", "model": "target", "port": 30000, "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}},
    "arms": {},
    "models": {"target": {"path": MODEL, "source": "host"}},
    "flags": {},
    "environment": {},
    "nccl": {},
    "disk_gib": 40,
}
KNOWN = rules.load()
IDS = [rule.id for rule in KNOWN]


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    question = host_info.Question(aerie_root=Path(ROOT), ports=(30000,), paths=(ROOT, MODEL), models=(MODEL,))
    return host_info.survey(host_info.open_host(HOSTS / name), question)


def judged(info: dict[str, Any], **want: Any) -> rules.Judgement:
    return rules.judge(KNOWN, info, WANT | want)


def fired(judgement: rules.Judgement, *severities: str) -> set[str]:
    return {finding.id for finding in judgement.findings if finding.severity in (severities or rules.SEVERITIES)}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The healthy host's info with the value at a path such as ``gpus.3.ecc.pending`` set, or for a callable, changed."""
    info = copy.deepcopy(recorded(HEALTHY))
    place: Any = info
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in parents:
        place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
    place[last] = value(place.get(last)) if callable(value) else value
    return info


def xid(number: int) -> dict[str, Any]:
    return changed("driver/xids", [{"seconds": 12.5, "xid": number, "pci": "0000:03:00.0", "message": "words"}])


def probe(name: str, status: str = "passed", **figures: Any) -> dict[str, Any]:
    return changed("probes", {name: {"status": status, "seconds": 3.0, "reason": "it said so", "figures": figures}})


SICK = {
    "acs-redirect": {"acs-redirect"},
    "bar1-256-mib": {"bar1-small"},
    "bare": {"no-gpus", "model-missing"},
    "caches-stale": {"p2p-cache-older-than-driver", "p2p-cache-older-than-boot", "caches-not-keyed"},
    "driver-mismatch": {"driver-not-as-installed", "no-gpus"},
    "force-p2p-loaded": {"p2p-forced"},
    "force-p2p-not-loaded": {"modprobe-not-in-force"},
    "governor-powersave": {"cpu-governor"},
    "gpu-lost": {"gpu-off-the-bus", "xid-gpu-lost", "gpus-odd-number", "gpus-fewer-than-wanted"},
    "gpu-memory-held": {"gpu-used-by-others"},
    "gpu-missing": {"gpus-odd-number", "gpus-fewer-than-wanted"},
    "gpu-throttled": {"throttled", "hot", "power-limit-low", "power-limits-differ", "persistence-off"},
    "gpu-wedged": {"gpu-wedged"},
    "iommu-on": {"iommu-translates"},
    "link-degraded": {"link-narrow", "slot-slower-than-gpu", "link-replays"},
    "memlock-limited": {"memlock"},
    "model-shard-missing": {"model-incomplete"},
    "nccl-conf-stale": {"nccl-graph-file", "nccl-conf-of-the-system"},
    "nccl-graph-file-empty": {"nccl-graph-file", "nccl-proto-ll", "nccl-environment-of-the-system"},
    "nvcc-12.8": {"nvcc-too-old", "ptxas-too-old", "nvcc-of-another-cuda"},
    "stray-cuda-12": {"stray-cuda-libraries"},
    "untuned": {"numa-balancing", "swappiness", "uvm-hmm"},
    "xid-8": {"xid-gpu-lost"},
}
"""Recorded hosts and all that is found there, besides what the healthy one has too."""

PAIR = {"forth_gb_s": {"median": 55.1}, "back_gb_s": {"median": 55.0}, "both_gb_s": {"median": 107.0}, "access": True}
MADE = {
    "gpu-asks-for-recovery": (changed("gpus/2/recovery_action", "Reset"), {}),
    "xid-memory": (xid(48), {}),
    "xid-driver": (xid(119), {}),
    "xid-of-a-program": (xid(31), {}),
    "xid-other": (xid(999), {}),
    "ecc-uncorrectable": (changed("gpus/0/ecc/uncorrectable", 2), {}),
    "ecc-pending": (changed("gpus/0/ecc/pending", True), {}),
    "ecc-differs": (changed("gpus/0/ecc/enabled", lambda now: not now), {}),
    "rows-remap-failed": (changed("gpus/0/remapped_rows/failed", True), {}),
    "rows-remap-pending": (changed("gpus/0/remapped_rows/pending", True), {}),
    "gpu-memory-held": (changed("gpus/0/memory_used_mib", 9000), {}),
    "compute-mode": (changed("gpus/0/compute_mode", "Exclusive_Process"), {}),
    "mig-on": (changed("gpus/0/mig", True), {}),
    "gpus-differ": (changed("gpus/0/name", "NVIDIA H200"), {}),
    "vbios-differs": (changed("gpus/0/vbios", "98.02.00.00.01"), {}),
    "power-range-of-another-board": (changed("gpus/0/power/max_w", 650.0), {}),
    "iommu-off-with-many-cpus": (changed("cpu/logical", 384) | {"kernel_parameters": {"iommu": ["off"]}}, {}),
    "acs-override-does-nothing": (changed("kernel_parameters/pcie_acs_override", ["downstream"]), {}),
    "p2p-not-supported": (changed("topology/p2p_read/0-1", "CNS"), {}),
    "driver-module-proprietary": (changed("driver/module", "proprietary"), {}),
    "driver-too-old": (changed("driver/version", "570.86.10"), {}),
    "driver-older-than-release": (changed("cuda_driver_version", "12.8"), {}),
    "driver-not-seen-before": (changed("driver/version", "600.10.01"), {}),
    "driver-not-wanted": (recorded(HEALTHY), {"driver_version": "590.48.01"}),
    "p2p-forced-and-cumem": (
        changed("driver/registry_dwords", "ForceP2P=0x11")
        | {"packages": {"release": {"nccl": "2.29.1", "torch_cuda": "13.0"}, "held": []}},
        {},
    ),
    "packages-half-installed": (changed("packages/broken", ["nvidia-open"]), {}),
    "driver-not-held": (changed("packages/held", []), {}),
    "kernel-headers-missing": (changed("packages/system", {"nvidia-dkms-open": "580.105.08-1"}), {}),
    "nccl-shadowed": (changed("libraries/cuda", [{"name": "libnccl", "path": "/x/libnccl.so.2", "major": 2, "source": "/x"}]), {}),
    "kernel-wheel-for-another-cuda": (changed("packages/release/kernel_cuda", "12.9"), {}),
    "nvcc-missing": (changed("tools/nvcc", None) | {"packages": {"release": {"flashinfer": "0.6.12"}}}, {}),
    "nccl-probes-infiniband": (changed("packages/release/nccl", "2.28.9"), {}),
    "system-not-tried": (changed("os/id", "rocky"), {}),
    "in-a-container": (changed("container", {"kind": "docker", "evidence": "/.dockerenv"}), {}),
    "pairs-cross-sockets": (changed("topology/links/0-1", "SYS"), {}),
    "disk-low": (recorded(HEALTHY), {"disk_gib": 10**6}),
    "root-not-writable": (changed(f"paths/{ROOT}/writable".replace(ROOT, "root"), False), {}),
    "port-taken": (changed("ports/30000", [{"pid": 7, "argv": ["nginx"], "instance": None, "root": None}]), {}),
    "empty-gpu-list": (recorded(HEALTHY), {"environment": {"CUDA_VISIBLE_DEVICES": ""}}),
    "probe-kernels": (probe("kernels", "failed"), {}),
    "probe-all-reduce": (probe("all_reduce", "timeout"), {}),
    "probe-own-all-reduce-slow": (
        probe(
            "all_reduce",
            custom=[{"ranks": 2, "sizes": [{"bytes": 8192, "latency_us": {"median": 145.0}}]}],
            runs=[{"ranks": 2, "graph": {"bytes": 8192, "latency_us": {"median": 9.7}}}],
        ),
        {},
    ),
    "probe-p2p": (probe("p2p", "failed"), {}),
    "probe-p2p-slow": (probe("p2p", pairs={"0-1": PAIR | {"both_gb_s": {"median": 50.2}}}), {}),
    "probe-p2p-latency": (probe("p2p", pairs={"0-1": PAIR | {"load_latency_us": 14.2}}), {}),
    "probe-link": (probe("link", "failed"), {}),
    "probe-link-below-best": (probe("link", gpus={"0": {"generation": 4, "generation_max": 5, "width": 16, "width_max": 16}}), {}),
    "probe-wedge": (probe("wedge", "failed"), {}),
}
"""Sicknesses that no recording has: the rule, the info, and what is wanted of the host."""
MADE["root-not-writable"] = (copy.deepcopy(recorded(HEALTHY)), {})
MADE["root-not-writable"][0]["paths"][ROOT]["writable"] = False


def test_a_healthy_host_has_neither_errors_nor_warnings_and_everything_is_judged():
    judgement = judged(recorded(HEALTHY))
    assert fired(judgement, rules.ERROR, rules.WARNING) == set()
    assert judgement.unjudged == ()


@pytest.mark.parametrize("name", SICK)
def test_a_recorded_sick_host_is_found_out_and_nothing_else_is_said_of_it(name):
    alike = fired(judged(recorded(HEALTHY)))
    found = fired(judged(recorded(name)))
    assert found - alike == SICK[name]


def test_a_real_host_with_two_gpus_has_what_was_really_found_there_and_no_error():
    judgement = judged(recorded("h200-x2"), instances={}, models={})
    assert fired(judgement, rules.ERROR) == set()
    assert fired(judgement, rules.WARNING) == {"nccl-conf-of-the-system"}
    assert {"uvm-hmm", "in-a-container", "caches-not-keyed"} <= fired(judgement, rules.NOTE)


def test_what_the_probes_gave_on_a_real_host_with_two_gpus_is_judged_and_is_well():
    probed = json.loads((HOSTS.parent / "probes/h200-x2.json").read_text())
    judgement = judged(recorded("h200-x2") | probed, instances={}, models={})
    about = {one for one in IDS if one.startswith("probe-")}
    assert [one.id for one in judgement.unjudged if one.id in about] == []
    assert about & fired(judgement) == set()


@pytest.mark.parametrize("rule", MADE)
def test_a_rule_finds_its_sickness(rule):
    info, want = MADE[rule]
    assert rule in fired(judged(info, **want))
    assert all(finding.evidence and "not known" not in " ".join(finding.evidence) for finding in judged(info, **want).findings)


def test_every_rule_fires_on_some_sick_host_and_every_recording_is_used():
    covered = set(MADE).union(*SICK.values())
    assert set(IDS) == covered
    based = {path.name for path in HOSTS.iterdir() if path.is_dir()} - {HEALTHY, "h200", "h200-x2", "container", "driver-without-module"}
    assert based - set(SICK) == set()


@pytest.mark.parametrize("name", sorted(path.name for path in HOSTS.iterdir() if path.is_dir()))
def test_whatever_a_host_does_not_tell_no_rule_breaks(name):
    judgement = judged(recorded(name))
    assert [why for one in judgement.unjudged for why in one.why if "can't take" in why] == []
    assert len(judgement.findings) + len(judgement.unjudged) + len(judgement.fine) == len(KNOWN)


def commands_by_rule() -> dict[str, tuple[str, ...]]:
    """The commands of each rule, on a host on which it fires."""
    commands: dict[str, tuple[str, ...]] = {}
    for judgement in (
        *(judged(recorded(name)) for name in SICK),
        *(judged(info, **want) for info, want in MADE.values()),
    ):
        for finding in judgement.findings:
            commands[finding.id] = commands.get(finding.id, ()) + finding.commands
    return commands


def is_setting(command: str) -> bool:
    return re.match(r"[a-z_]+: ", command) is not None


def test_every_command_that_a_rule_has_is_shown_where_it_fires():
    commands = commands_by_rule()
    assert [rule.id for rule in KNOWN if rule.commands and not commands[rule.id]] == []
    assert sum(bool(rule.commands) for rule in KNOWN) > 45


def test_a_command_can_be_pasted_into_a_shell_and_names_a_playbook_that_exists():
    for rule, commands in commands_by_rule().items():
        for command in commands:
            if is_setting(command):
                continue
            assert not set(command) & set("<>;|&`\n"), (rule, command)
            argv = shlex.split(command)
            if argv[0] == "ansible-playbook":
                assert (PROJECT / argv[3]).is_file(), (rule, command)


def test_a_setting_can_be_pasted_into_an_inventory():
    specs = [yaml.safe_load(path.read_text()) for path in PROJECT.glob("roles/*/meta/argument_specs.yml")]
    options = {name for spec in specs for entry in spec["argument_specs"].values() for name in entry.get("options", {})}
    for rule, commands in commands_by_rule().items():
        for command in filter(is_setting, commands):
            ((name, value),) = yaml.safe_load(command).items()
            assert name in options | {"ansible_become"}, (rule, command)
            if name == "host_tuning_settings":
                assert tuning_settings.parse(value)[1] == [], (rule, command)


def test_no_fix_holds_a_command_in_its_sentence():
    literals = re.compile(r"\b(nvidia-smi -|rm -|fuser |apt-get |dpkg -|ldconfig|playbooks/|update-initramfs)|<GPU>|<W>")
    cures = {entry["id"]: entry["cure"] for entry in yaml.safe_load(rules.RULES.read_text())["rules"]}
    assert {name: cure for name, cure in cures.items() if literals.search(cure)} == {}


HOSTILE_PATHS = (
    "/x; reboot #.json",
    "/x'; reboot; '.json",
    '/x$(reboot)`reboot`".json',
    "/x\nreboot\n.json",
    "/x\x1b[2J\x1b]52;c;cm0=\x07.json",
    "/etc/\u200bpasswd",
    "/back\\slash\u202e'quote.json",
    "/caf\udce9/ö.json",
    "-rf",
)


def arguments(command: str) -> list[str]:
    """What bash makes of a command: words, and $'…' with its escapes, which shlex doesn't know."""
    match = re.fullmatch(r"(.*)\$'([^']*)'", command)
    if match is None:
        return shlex.split(command)
    data = match[2].encode("ascii").decode("unicode_escape").encode("latin-1")
    return [*shlex.split(match[1]), data.decode("utf-8", "surrogateescape")]


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_a_host_s_path_is_an_argument_whatever_it_holds(path):
    info = copy.deepcopy(recorded("caches-stale"))
    cache = next(cache for cache in info["caches"] if cache["kind"] == "sglang_p2p" and not cache["release_keyed"])
    cache["path"] = path
    (finding,) = (finding for finding in judged(info).findings if finding.id == "p2p-cache-older-than-driver")
    (command,) = finding.commands
    assert command.isprintable() and command == words.clean(command)
    assert arguments(command) == ["rm", "--", path]


def test_a_command_that_needs_a_value_that_is_not_known_is_left_out():
    rule = GOOD | {"commands": ["rm -- {{ info.user.name }}", "{{ info.gpus }}", "ls -- {{ info.packages.held }}"]}
    (lone,) = rules.read({"rules": [rule]}, "here")
    info = {"kernel": "a", "user": {"name": None}, "packages": {"held": ["a b", "c"]}}
    (finding,) = rules.judge([lone], info, {"profile": "cuda"}).findings
    assert finding.commands == ("ls -- 'a b' c",)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        # Mappings of many names, as of packages or links, are alike all through.
        shown = dict(list(value.items())[:30]) if path else value
        return [path, *(leaf for key, inner in shown.items() for leaf in leaves(inner, (*path, key)))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [path, *leaves(value[0], (*path, 0))]
    return [path]


def test_no_missing_value_breaks_a_rule_or_makes_it_say_that_all_is_well():
    healthy = recorded(HEALTHY)
    fine = set(judged(healthy).fine)
    told = 0
    for path in leaves(healthy):
        if not path or path[0] in ("survey", "processes"):
            continue
        info = copy.copy(healthy)
        place: Any = info
        for key in path[:-1]:
            place[key] = copy.copy(place[key])
            place = place[key]
        place[path[-1]] = None
        judgement = judged(info)
        assert [why for one in judgement.unjudged for why in one.why if "can't take" in why] == [], path
        assert fine - set(judgement.fine) <= {one.id for one in judgement.unjudged} | fired(judgement), path
        told += len(judgement.unjudged)
    assert told > 100


def test_what_can_not_be_judged_is_told_with_the_survey_s_own_reason():
    info = changed("driver/xids", None)
    info["driver"]["kernel_log_reason"] = "dmesg: Operation not permitted"
    (found,) = [one for one in judged(info).unjudged if one.id == "xid-gpu-lost"]
    assert found.why == ("driver.xids is not known: dmesg: Operation not permitted",)


def test_one_gpu_that_does_not_tell_does_not_hide_another_that_is_sick():
    info = changed("gpus/0/bar1_total_mib", 256)
    info["gpus"][1]["bar1_total_mib"] = None
    (finding,) = [one for one in judged(info).findings if one.id == "bar1-small"]
    assert len(finding.evidence) == 1
    assert finding.not_known == ("gpus[1].bar1_total_mib is not known",)


def test_a_cpu_host_is_not_asked_about_gpus():
    assert fired(judged(recorded("bare"), profile="cpu", models={})) == set()


GOOD = {"id": "x", "severity": "note", "when": "info.kernel == 'a'", "evidence": ["e"], "cause": "c", "cure": "c", "reference": "r"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wehn": "true"}, "rule x: wehn: no such key; did you mean 'when'?"),
        ({"when": "info.kernel =="}, "rule x: when: 'info.kernel ==' is no expression"),
        ({"when": "info.kernl == 1"}, "rule x: when: info.kernl: no host's info has kernl there; did you mean 'kernel'?"),
        ({"when": "info.gpus.name == 1"}, "name is asked of a list"),
        ({"when": "info.kernel.release == 1"}, "release is asked of a plain value"),
        ({"when": "info.gpus | selectattr('nam') | list"}, "no host's info has nam there; did you mean 'name'"),
        ({"when": "gpu.name == 1"}, "gpu: there is no such name, only info, want"),
        ({"each": {"gpu": "info.gpus"}, "when": "gpu.nme == 1"}, "gpu.nme: no host's info has nme there"),
        ({"each": {"gpu": "info.gpuss"}}, "each.gpu: info.gpuss"),
        ({"when": "info.kernel | shell"}, "No filter named 'shell'"),
        ({"evidence": ["{{ info.kernl }}"]}, "evidence: info.kernl"),
        ({"evidence": ["{{ info.kernel"]}, "is no text"),
        ({"evidence": "e"}, "evidence must be a list of texts"),
        ({"severity": "fatal"}, "severity is 'fatal': it must be error, warning or note"),
        ({"profiles": ["tpu"]}, "profiles is ['tpu']"),
        ({"cure": None}, "cure is missing"),
        ({"id": 3}, "id must be a text"),
        ({"commands": "rm"}, "commands must be a list of texts"),
        ({"commands": ["rm {{ info.kernl }}"]}, "commands: info.kernl"),
        ({"commands": ["one\ntwo"]}, "must be one line"),
    ],
)
def test_a_bad_rule_is_refused_with_file_and_id(tmp_path, change, said):
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"rules": [GOOD | change]}))
    with pytest.raises(AerieError) as raised:
        rules.load(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_all_mistakes_are_told_at_once_and_a_name_is_taken_once(tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"rules": [GOOD, GOOD | {"when": "nope"}, GOOD | {"id": "y", "cure": ""}]}))
    with pytest.raises(AerieError) as raised:
        rules.load(path)
    assert all(words in str(raised.value) for words in ("two rules are called x", "nope: there is no such name", "rule y: cure is missing"))


def test_an_expression_reaches_nothing_but_the_info():
    rule = GOOD | {"when": "info.kernel.__class__.__mro__ | length > 0"}
    with pytest.raises(AerieError, match="asked of a plain value"):
        rules.read({"rules": [rule]}, "here")
    (lone,) = rules.read({"rules": [GOOD | {"when": "('{0.__class__}' ~ info.kernel).format(1) != ''"}]}, "here")
    judgement = rules.judge([lone], {"kernel": "a"}, {"profile": "cuda"})
    assert [one.id for one in judgement.unjudged] == ["x"]


def missing(shape: Any, value: Any, path: str = "info") -> list[str]:
    """Paths of ``value`` that the shape doesn't know."""
    if isinstance(value, dict) and isinstance(shape, dict):
        inner = {key: shape.get(key, shape.get("*")) for key in value}
        lost = [f"{path}.{key}" for key in value if key not in shape and "*" not in shape]
        return lost + [one for key in value if key in shape or "*" in shape for one in missing(inner[key], value[key], f"{path}.{key}")]
    if isinstance(value, list) and isinstance(shape, list):
        return [one for row in value for one in missing(shape[0], row, f"{path}[]")]
    return []


def known_paths(shape: Any, path: str = "info") -> set[str]:
    if isinstance(shape, dict) and "*" not in shape:
        return {f"{path}.{key}" for key in shape}.union(*(known_paths(inner, f"{path}.{key}") for key, inner in shape.items()))
    return known_paths(shape[0], f"{path}[]") if isinstance(shape, list) else set()


def paths_of(value: Any, path: str = "info") -> set[str]:
    if isinstance(value, dict):
        return {f"{path}.{key}" for key in value}.union(*(paths_of(inner, f"{path}.{key}") for key, inner in value.items()))
    return set().union(*(paths_of(row, f"{path}[]") for row in value)) if isinstance(value, list) else set()


def test_the_shape_that_rules_are_checked_against_is_the_survey_s():
    for name in (HEALTHY, "h200", "h200-x2", "bare", "nccl-conf-stale", "gpu-memory-held", "caches-stale"):
        assert sorted(set(missing(schema.INFO, recorded(name)))) == []
    there: set[str] = set()
    for name in SICK:
        there |= paths_of(recorded(name))
    asked = {path for path in known_paths(schema.INFO) if not path.startswith(("info.probes", "info.healthy_after"))}
    assert sorted(path for path in asked - there if not path.startswith(("info.ports", "info.servers", "info.pythons", "info.paths"))) == []


def test_each_of_the_pains_has_one_owner_that_exists():
    assert pains.known() == []
    assert [pain.number for pain in pains.load()] == list(range(1, 27))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("preflight_rule", "no-such-rule"),
        ("active_probe", "telepathy"),
        ("launch_check", "gpu_settings: sm120-nothing"),
        ("launch_check", "serving.launch_checks.nothing"),
        ("release_check", "serving.nowhere.problems"),
        ("launch_check", "serving.server_smoke.__doc__"),
    ],
)
def test_a_pain_whose_owner_is_gone_is_an_orphan(kind, name):
    (problem,) = pains.orphans([pains.Pain(3, "s", "c", kind, name)], IDS)
    assert problem == f"pain 3: there is no {kind} {name}"


def test_a_function_that_nobody_calls_owns_nothing(tmp_path):
    package = tmp_path / "module_utils/aerie/serving"
    package.mkdir(parents=True)
    (package / "checks.py").write_text("def idle():\n    pass\n\n\ndef used():\n    pass\n\n\nused()\n")
    (tmp_path / "profiles/cuda").mkdir(parents=True)
    (tmp_path / "profiles/cuda/gpu_settings.yml").write_text("rules: []\n")
    owned = [pains.Pain(number, "s", "c", "launch_check", f"serving.checks.{name}") for number, name in enumerate(("idle", "used"), 1)]
    assert pains.orphans(owned, IDS, tmp_path) == ["pain 1: there is no launch_check serving.checks.idle"]


def test_a_missing_pain_is_told(tmp_path):
    path = tmp_path / "pains.yml"
    content = yaml.safe_load(pains.PAINS.read_text())
    del content["pains"][7]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(AerieError, match="pain 7 is missing"):
        pains.load(path)
