"""A preflight is told on the terminal, as JSON and as a page; two hosts are told apart by what matters; a run fails as it was asked to."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import verdict
from example_records import campaign
from test_preflight_rules import HEALTHY, HOSTS, KNOWN, MODEL, ROOT, WANT, recorded

from aerie_controller import report, terminal
from aerie_controller.preflight import compare, results, rules
from aerie_controller.terminal_reports import preflight as preflight_parts
from ports import free_port

PROJECT = Path(__file__).parents[2]
EVIL = '<script>alert("x")</script>\x1b[2J{{ 7 * 7 }}'


def result(name: str, host: str | None = None, **want: Any) -> results.HostResult:
    return results.examine(KNOWN, host or name, recorded(name), WANT | want)


def text_of(found: list[results.HostResult], paths: dict[str, str] | None = None, width: int = 100) -> str:
    return terminal.render(preflight_parts.parts(found, paths), width)


def compared(difference: compare.Comparison, width: int = 100) -> str:
    return terminal.render(preflight_parts.comparison(difference), width)


def lost(host: str = "gpu-9") -> results.HostResult:
    return results.HostResult(host, unreachable="no route to host")


def test_the_terminal_shows_the_worst_first_each_finding_once_and_who_was_not_asked():
    found = [result(HEALTHY, "a"), result("bar1-256-mib", "b"), result("bar1-256-mib", "c"), result("acs-redirect", "d"), lost("e")]
    said = text_of(found, {"page": "/x/preflight.html"})
    assert said.count("bar1-small") == 1
    assert "ERROR  bar1-small on b and c" in said
    assert said.index("bar1-small") < said.index("WARNING  acs-redirect on d") < said.index("note  pairs-cross-sockets")
    assert re.search(r"^e .*not asked: no route to host$", said, re.MULTILINE)
    assert said.endswith("page: /x/preflight.html\n")
    assert all(words in said for words in ("why: ", "fix: BIOS: Above 4G Decoding", "see: ", "and 4 more"))


@pytest.mark.parametrize("width", [80, 140])
def test_a_command_of_a_fix_stands_whole_on_a_line_of_its_own(width):
    found = [result("caches-stale", "a"), result("untuned", "b")]
    lines = text_of(found, width=width).splitlines()
    cache = "/home/user1/.cache/sglang/gpu_p2p_access_cache_for_0,1,2,3,4,5,6,7.json"
    assert f"        rm -- {cache}" in lines
    assert '        host_tuning_settings: {sysctl: {vm.swappiness: "0"}}' in lines
    assert lines[lines.index(f"        rm -- {cache}") - 1] == "    fix: remove it"
    page = report.render_preflight(found)
    assert f"<code>rm -- {cache}</code>" in page
    assert "<code>host_tuning_settings: {sysctl: {vm.swappiness: &#34;0&#34;}}</code>" in page


def test_hosts_whose_commands_differ_have_their_own():
    other = copy.deepcopy(recorded("caches-stale"))
    for cache in other["caches"]:
        cache["path"] = cache["path"].replace("user1", "user2")
    found = [result("caches-stale", "a"), results.examine(KNOWN, "b", other, WANT)]
    said = text_of(found)
    for host, user in (("a", "user1"), ("b", "user2")):
        assert f"    fix on {host}: remove it\n        rm -- /home/{user}/.cache/sglang/" in said


def test_severities_are_coloured():
    said = terminal.render(preflight_parts.parts([result("acs-redirect", "a"), lost()]), 100, colour=True)
    assert "\x1b[33mWARNING\x1b[0m" in said
    assert "\x1b[1;31mnot asked: no route to host" in said


def test_a_run_s_summary_is_short_and_has_the_worst_host_first():
    found = [result(HEALTHY, "a"), result("bar1-256-mib", "b"), result("gpu-lost", "c"), lost()]
    first, second, third = preflight_parts.run_summary(found, "/x/preflight.html")
    assert first["text"].startswith("2 of 4 hosts have errors: c (gpu-off-the-bus, ")
    assert first["text"].endswith("b (bar1-small)")
    assert second["text"] == "1 of 4 hosts could not be asked: gpu-9"
    assert third == {"text": "page", "path": "/x/preflight.html"}
    many = [result("bar1-256-mib", f"gpu-{number:02}") for number in range(40)]
    assert preflight_parts.run_summary(many, "/x")[0]["text"].endswith("gpu-04 (bar1-small) and 35 more")
    (warned, _) = preflight_parts.run_summary([result("acs-redirect", "d")], "/x")
    assert warned == {"text": "1 of 1 host has warnings: d (acs-redirect)", "style": "warning"}
    (well, _) = preflight_parts.run_summary([result(HEALTHY, "a")], "/x")
    assert re.fullmatch(r"no errors or warnings on 1 host, \d+ notes?", well["text"])


def test_a_result_of_an_earlier_aerie_without_commands_is_read():
    value = result("untuned", "a").as_dict()
    for finding in value["findings"]:
        del finding["commands"]
    assert all(finding.commands == () for finding in results.HostResult.from_dict(value).findings)


def test_what_became_of_active_probes_is_told():
    probes = {
        "kernels": {"status": "passed", "seconds": 6.2, "reason": None, "figures": {}},
        "p2p": {"status": "skipped", "seconds": 0.0, "reason": "one GPU", "figures": {}},
        "all_reduce": {"status": "timeout", "seconds": 120.0, "reason": "rank 1 stopped at 'first all_reduce'", "figures": {}},
    }
    found = results.examine(KNOWN, "a", recorded(HEALTHY) | {"probes": probes}, WANT)
    for said in (text_of([found]), report.render_preflight([found])):
        assert "kernels passed (6.2 s); p2p skipped: one GPU; all_reduce timeout (120.0 s)" in said
        assert "stopped at" in said and "probe-all-reduce" in said


def test_what_was_not_judged_is_told_by_reason():
    said = text_of([result("bare", "new")])
    assert re.search(r"gpus is not known: nvidia-smi: not found: .* more rules", said.replace("\n    ", " "))


def test_no_host_s_words_reach_the_terminal_or_the_page_as_more_than_words():
    info = copy.deepcopy(recorded("bar1-256-mib"))
    info["kernel"] = info["os"]["name"] = info["gpus"][0]["name"] = EVIL
    info["driver"]["xids"] = [{"seconds": 1.0, "xid": 79, "pci": EVIL, "message": EVIL}]
    found = results.examine(KNOWN, EVIL, info, WANT)
    said = text_of([found]) + compared(compare.compare(result(HEALTHY), found))
    assert "\x1b" not in said
    assert "{{ 7 * 7 }}" in said
    page = report.render_preflight([found], [compare.compare(result(HEALTHY), found)])
    assert "<script" not in page
    assert "49" not in re.findall(r"alert.{0,60}", page)[0]


@pytest.mark.parametrize("width", [100, 80])
def test_lines_stay_within_the_terminal(width):
    found = [result("gpu-lost", "gpu-lost-somewhere-in-a-rack-with-a-very-long-name"), result("nccl-conf-stale"), lost()]
    texts = [text_of(found, width=width), compared(compare.compare(found[0], found[1]), width=width)]
    commands = tuple(f"        {command}" for host in found for finding in host.findings for command in finding.commands)
    assert max(len(line) for text in texts for line in text.splitlines() if not line.startswith(commands)) <= width


def test_playbooks_of_fixes_are_for_the_inventory_of_the_run_and_for_the_hosts_of_the_finding():
    hosts = [result("nccl-conf-stale", "a"), result("nccl-conf-stale", "b"), result(HEALTHY, "c")]
    text = text_of([results.with_inventory(host, "-i 'my fleet'") for host in hosts])
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("ansible-playbook ")]
    assert lines
    for line in lines:
        assert line.startswith("ansible-playbook -i 'my fleet' playbooks/")
        assert line.endswith((" --limit a,b", " --limit c", " --limit a,b,c"))


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.tags.append(tag)
        self.ids += [about["id"] or ""] if "id" in about else []
        self.references |= {(about.get("href") or "#").removeprefix("#"), *(about.get("aria-labelledby") or "").split()}


def test_the_page_holds_everything_and_loads_nothing():
    found = [result(HEALTHY, "a"), result("gpu-lost", "b"), result("bare", "c"), lost()]
    assert "Preflight: 5 errors, 1 warning, 4 notes and 1 host not asked" in report.render_preflight(found)
    text = report.render_preflight(found, [compare.compare(found[0], found[1])])
    parsed = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.references - {""} <= set(parsed.ids)
    assert {"script", "link", "img"} & set(parsed.tags) == set()
    assert text.count("<caption") == text.count("<table")
    for words in (
        "gpu-off-the-bus",
        "does not answer on the bus",
        "no route to host",
        "not judged",
        "b compared with a",
    ):
        assert words in text, words


def test_the_benchmark_s_report_has_the_section_where_there_are_results():
    groups = verdict.groups(campaign())
    assert 'id="preflight"' not in report.render(groups)
    text = report.render(groups, preflight=[result("gpu-wedged", "gpu-1")])
    parsed = Page(text)
    assert 'id="preflight"' in text and "gpu-wedged" in text
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.references - {""} <= set(parsed.ids)


def test_a_host_compared_with_itself_or_a_twin_does_not_differ():
    twin = copy.deepcopy(recorded(HEALTHY))
    twin |= {"hostname": "other", "machine_id_hash": "ffff", "fingerprint": "f", "uptime_seconds": 9e6, "survey": {"seconds": 9.0}}
    twin["memory"]["available_bytes"] = 1
    twin["memory"]["total_bytes"] += 4096
    twin["kernel_command_line"] = re.sub(r"root=\S+", "root=UUID=1234", twin["kernel_command_line"])
    twin["kernel_parameters"]["root"] = ["UUID=1234"]
    twin["paths"][ROOT]["free_bytes"] -= 10**9
    for number, gpu in enumerate(twin["gpus"]):
        gpu |= {"uuid": f"GPU-{number}", "temperature_c": 50, "utilization_percent": 3}
        gpu["power"]["draw_w"] = 77.0
    found = compare.compare(result(HEALTHY), results.examine(KNOWN, "twin", twin, WANT))
    assert found.empty, found
    assert "No difference" in compared(found)


@pytest.mark.parametrize(
    ("name", "rule", "path"),
    [
        ("bar1-256-mib", "bar1-small", "gpus[0, 1, 2, 3, 4, 5, 6, 7].bar1_total_mib"),
        ("iommu-on", "iommu-translates", "iommu.passthrough"),
        ("force-p2p-loaded", "p2p-forced", "driver.registry_dwords"),
        ("untuned", "numa-balancing", "sysctl.kernel.numa_balancing"),
        ("stray-cuda-12", "stray-cuda-libraries", "libraries.cuda.length"),
        ("nvcc-12.8", "nvcc-too-old", "tools.nvcc.version"),
        ("acs-redirect", "acs-redirect", "pci.bridges[0].acs.request_redirect"),
    ],
)
def test_a_comparison_begins_with_the_rule_and_names_what_differs(name, rule, path):
    found = compare.compare(result(HEALTHY), result(name))
    assert rule in [finding.id for finding in found.only_bad]
    assert found.only_good == ()
    assert path in [difference.path for difference in found.differences]
    said = compared(found)
    assert said.index(rule) < said.index("differs")


def test_what_matters_comes_before_what_does_not():
    info = copy.deepcopy(recorded(HEALTHY))
    info["pythons"] = {}
    info["sysctl"]["vm.swappiness"] = "1"
    info["driver"]["version"] = "590.48.01"
    info["gpus"][3]["vbios"] = "other"
    paths = [one.path for one in compare.differences(recorded(HEALTHY), info)]
    assert [path.split(".")[0] for path in paths][:3] == ["driver", "gpus[3]", "sysctl"]
    assert paths[-1].startswith("pythons")


def test_json_gives_back_what_was_found(tmp_path):
    found = result("gpu-lost")
    (tmp_path / "gpu-lost.json").write_text(json.dumps(found.as_dict()))
    (tmp_path / "comparison.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (again,) = results.kept(tmp_path)
    assert again == found
    assert compare.compare(found, again).empty


def test_a_recording_or_a_file_can_stand_for_a_host(tmp_path):
    (tmp_path / "good.json").write_text(json.dumps(result(HEALTHY).as_dict()))
    good = results.of_place(str(tmp_path / "good.json"), KNOWN, WANT, {})
    bad = results.of_place(str(HOSTS / "bar1-256-mib"), KNOWN, WANT, {})
    assert [finding.id for finding in compare.compare(good, bad).only_bad] == ["bar1-small"]
    with pytest.raises(AerieError, match="neither a host of this run, nor a recording"):
        results.of_place(str(tmp_path / "none"), KNOWN, WANT, {})


def test_ignored_findings_are_set_apart_with_their_reason_and_fail_nothing():
    ignore = results.ignored([{"id": "bar1-small", "reason": "a test board"}], KNOWN)
    found = results.examine(KNOWN, "a", recorded("bar1-256-mib"), WANT, ignore)
    assert not found.fails(rules.WARNING)
    assert "ignored on a: error bar1-small: a test board" in text_of([found])
    with pytest.raises(AerieError, match="no rule is called 'bar1-smal'; did you mean 'bar1-small'"):
        results.ignored(["bar1-smal"], KNOWN)
    with pytest.raises(AerieError, match="must have id and reason"):
        results.ignored([{"id": "hot", "why": "x"}], KNOWN)


@pytest.mark.parametrize(
    ("found", "fail_on", "fails"),
    [
        (result("bar1-256-mib"), "error", True),
        (result("acs-redirect"), "error", False),
        (result("acs-redirect"), "warning", True),
        (result(HEALTHY), "warning", False),
        (result("bar1-256-mib"), "never", False),
        (lost(), "error", True),
        (lost(), "never", False),
    ],
)
def test_a_run_fails_as_it_was_asked_to(found, fail_on, fails):
    assert found.fails(fail_on) is fails


@pytest.fixture
def preflight(tmp_path):
    """Runs playbooks/preflight.yml over recorded hosts and one that nobody can reach; returns exit status and output."""

    def run(*options: str, hosts: dict[str, str], dead: bool = False, **variables: Any) -> tuple[int, str]:
        entries: dict[str, Any] = {name: {"preflight_root": str(HOSTS / recording)} for name, recording in hosts.items()}
        if dead:
            address = {"ansible_host": "127.0.0.1", "ansible_port": free_port()}
            entries["dead"] = {"ansible_connection": "ssh", **address}
        inventory = tmp_path / "hosts.yml"
        common = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "aerie_profile": "cuda",
            "aerie_root": ROOT,
            "aerie_results": str(tmp_path / "results"),
            "sglang_models_catalog": {"target": {"path": MODEL, "source": "host"}},
            "sglang_server_arms": {"baseline": {}},
            "sglang_server_instances": {"main": {"arm": "baseline", "model": "target", "port": 30000}},
        }
        inventory.write_text(yaml.safe_dump({"gpu_hosts": {"vars": common, "hosts": entries}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), *options]
        command += ["-e", json.dumps(variables), str(PROJECT / "playbooks/preflight.yml")]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, f"{done.stdout}\n{done.stderr}"

    return run


def test_a_run_reports_every_host_fails_for_the_sick_and_the_lost_and_does_not_stop_for_either(tmp_path, preflight):
    status, said = preflight(hosts={"good": HEALTHY, "bad": "bar1-256-mib", "slow": "acs-redirect"}, dead=True)
    assert status != 0
    assert said.count("\nPreflight\n") == 1
    assert "ERROR  bar1-small on bad" in said and "WARNING  acs-redirect on slow" in said and "not asked:" in said
    assert re.search(r"^fatal: \[bad\]: FAILED! => 1 error: bar1-small$", said, re.MULTILINE)
    assert re.search(r"^fatal: \[dead\]: FAILED! => could not be asked: ", said, re.MULTILINE)
    last = said.strip().splitlines()[-3:]
    assert last[0] == "1 of 4 hosts has errors: bad (bar1-small)"
    assert last[1] == "1 of 4 hosts could not be asked: dead"
    assert last[2] == f"page: {tmp_path}/results/preflight/preflight.html"
    failed = {host: int(count) for host, count in re.findall(r"^(\w+) .*failed=(\d+)", said, re.MULTILINE)}
    assert failed == {"good": 0, "bad": 1, "slow": 0, "dead": 1}
    output = tmp_path / "results/preflight"
    assert sorted(path.name for path in output.iterdir()) == ["bad.json", "dead.json", "good.json", "preflight.html", "slow.json"]
    assert json.loads((output / "bad.json").read_text())["counts"]["error"] == 1
    assert json.loads((output / "dead.json").read_text())["unreachable"]


def test_a_model_that_differs_is_told_and_one_that_is_not_known_is_no_difference():
    def with_model(**about):
        return recorded(HEALTHY) | {"models": {MODEL: {"problems": [], "bytes": 5, "identity": None} | about}}

    one, other = "3f" * 32, "4e" * 32
    path = f"models.{MODEL}.identity"
    (found,) = compare.differences(with_model(identity=one), with_model(identity=other))
    assert (found.path, found.good, found.bad) == (path, one, other)
    assert compare.differences(with_model(identity=one), with_model(identity=one)) == []
    assert compare.differences(with_model(identity=one), with_model()) == []
    gone = compare.differences(with_model(identity=one), recorded(HEALTHY) | {"models": {}})
    assert f"models.{MODEL}.bytes" in [one.path for one in gone]
    bad = results.examine(KNOWN, "bad", with_model(identity=other), WANT)
    said = compared(compare.compare(results.examine(KNOWN, "good", with_model(identity=one), WANT), bad))
    assert MODEL in said and one[:12] in said and other[:12] in said


def test_two_hosts_are_compared_and_a_rehearsal_writes_nothing(tmp_path, preflight):
    bad = str(HOSTS / "bar1-256-mib")
    status, said = preflight(
        "--check", hosts={"good": HEALTHY, "other": "gpu-lost"}, preflight_compare=["good", bad], preflight_ignore=["bar1-small"]
    )
    assert status == 0
    assert "bar1-256-mib compared with good" in said
    assert "gpus[0, 1, 2, 3, 4, 5, 6, 7].bar1_total_mib" in said
    assert "gpu-off-the-bus" not in said, "a host that isn't compared is not asked"
    assert "page (would be written)" in said
    assert not (tmp_path / "results").exists()


def test_a_host_that_no_inventory_knows_needs_no_settings(tmp_path):
    asked = {"ansible_python_interpreter": sys.executable, "preflight_root": str(HOSTS / "bar1-256-mib"), "aerie_results": str(tmp_path)}
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "gpu-7,", "--connection", "local", "-e", json.dumps(asked)]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
    command.append(str(PROJECT / "playbooks/preflight.yml"))
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ERROR  bar1-small" in done.stdout
    assert json.loads((tmp_path / "preflight/gpu-7.json").read_text())["counts"]["error"] == 1


def test_probes_that_were_asked_for_and_could_not_run_fail_the_host_after_everything_was_told(preflight):
    status, said = preflight(hosts={"good": HEALTHY}, preflight_active=True, preflight_probe_seconds=0)
    assert status == 2, said
    assert said.count("\nPreflight\n") == 1
    assert "good: the active probes did not run: " in said.partition("\nPreflight\n")[2]
    status, said = preflight(hosts={"good": HEALTHY}, preflight_active=True, preflight_probe_seconds=0, preflight_fail_on="never")
    assert status == 0, said
