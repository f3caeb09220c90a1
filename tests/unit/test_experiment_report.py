"""The report is one page that holds everything, says what the records say, and is the same for the same records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.aerie.measuring import verdict
from example_records import FLASHINFER, TRITON, campaign, record, write

from aerie_controller import PROJECT, report

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Parses strictly enough to tell an unclosed or wrongly nested element; keeps ids, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page(records, **options) -> tuple[str, Page]:
    text = report.render(verdict.groups(records), **options)
    return text, Page(text)


def everything() -> list[dict]:
    records = [*campaign(), *campaign(TRITON, repeats=1, host="gpu-2"), record("eagle3", 128, None)]
    for each in records:
        if each["arm"]["name"] == "eagle3" and each["host"] == "gpu-1":
            each["environment"] = {"SGLANG_SIMULATE_ACC_LEN": "2.4"}
    return records


def test_the_page_loads_nothing_from_anywhere():
    text, parsed = page(everything())
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert {name for name, _ in parsed.elements} & {"script", "link", "img", "iframe", "object", "embed", "form"} == set()
    assert all(str(attributes.get("href", "#")).startswith("#") for _, attributes in parsed.elements)


def test_ids_are_unique_and_every_reference_has_its_target():
    text, parsed = page(everything())
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    for _, attributes in parsed.elements:
        referred |= set((attributes.get("aria-labelledby") or "").split())
    assert referred <= set(ids)


def test_it_holds_the_figures_the_verdict_and_what_was_measured():
    _, parsed = page(everything(), title="Two hosts")
    for words in (
        "Two hosts",
        "eagle3 is faster than baseline up to about 47 clients and slower from there to 64",
        "eagle3 is faster than baseline up to about 17 clients",
        "One launch each: no spread known",
        "1 780",
        "1.51×",
        "1.45–1.57",
        "2.40 sim.",
        "Acceptance of eagle3 is simulated",
        "eagle3-c128-r1",
        "the server ran out of memory while it captured CUDA graphs",
        "0.5.15.post1-3f9a1c2b7d04",
        "9d1f" * 16,
        "a1b2" * 16,
        "e5f6" * 16,
        "SGLANG_SIMULATE_ACC_LEN=2.4 python -m sglang.launch_server --attention-backend flashinfer --speculative-algorithm EAGLE3",
        "target verify",
        "gpu-1: 2 × NVIDIA H200 (driver 580.65.06); CUDA 13.0; AMD EPYC 9654, 32 CPUs; Ubuntu 24.04.3 LTS; Linux 6.8.0-60-generic",
        "Measured 2026-01-02, 03:01 to 03:03 UTC",
    ):
        assert words in parsed.text, words


def test_every_plot_has_words_for_those_who_do_not_see_it():
    text, parsed = page(everything())
    plots = [attributes for attributes in parsed.all("svg") if attributes.get("class") == "plot"]
    assert len(plots) == 6
    assert all(attributes["role"] == "img" and len((attributes["aria-labelledby"] or "").split()) == 2 for attributes in plots)
    assert "<desc" in text
    assert "eagle3: 1.51 at 1, 1.22 at 8, 1.15 at 32, 0.89 at 64" in parsed.text
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    assert parsed.all("html")[0]["lang"] == "en"


def test_plots_use_only_the_page_s_colours_so_that_dark_and_print_are_legible():
    text, _ = page(everything())
    drawn = "".join(re.findall(r'<svg class="plot".*?</svg>', text, re.DOTALL))
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b", re.sub(r'(url\(#|href="#)[^)"]+', "", drawn)) == []
    assert "font-family" not in drawn  # the page's own font
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", text))
    blocks = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    assert len(blocks) == 3
    assert all(f"{name}:" in blocks[0] for name in used)
    colours = {name for name in used if name not in ("--sans", "--serif", "--mono")}
    assert all(f"{name}:" in block for name in colours for block in blocks)


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_and_lines_stand_out_from_the_paper_in_light_dark_and_print():
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for what a plot draws."""
    text, _ = page(campaign())
    for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL):
        colours = dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6}|#[0-9a-f]{3});", block))
        colours = {name: value if len(value) == 7 else "#" + "".join(2 * digit for digit in value[1:]) for name, value in colours.items()}
        for name, value in colours.items():
            needed = 4.5 if name in ("--ink", "--muted", "--warn") or name.startswith("--part") else 3 if name.startswith("--series") else 1
            light, dark = sorted((luminance(value), luminance(colours["--paper"])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= needed, (name, value)


def test_hostile_words_stay_words():
    evil = '<script>alert("x")</script>$\\frac{$'
    bad = record(evil, 8, 150.0, reason=evil, argv=[evil], run_id=evil, host=evil, environment={evil: evil}, client={"name": evil})
    bad["arm"]["description"] = evil
    profiled = dict(next(each for each in campaign() if each["kind"] == "profile"), run_id=evil, host=evil)
    profiled["arm"] = bad["arm"]
    lost = record(evil, 16, None, reason=evil, run_id=evil, host=evil)
    lost["arm"] = bad["arm"]
    text, parsed = page([record("baseline", 8, 100.0, run_id=evil, host=evil), bad, profiled, lost], title=evil)
    assert "<script" not in text
    assert parsed.text.count(evil) > 10


def test_the_same_records_give_the_same_bytes_in_another_process_too(tmp_path):
    write(tmp_path, everything())
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from aerie_controller import report; from pathlib import Path;"
        "from ansible.module_utils.aerie.measuring import ledger, verdict;"
        "sys.stdout.write(report.render(verdict.groups(ledger.choose(ledger.scan(Path(sys.argv[2]))))))"
    )
    pages = {
        subprocess.run(
            [sys.executable, "-c", code, str(PROJECT / "plugins"), str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
            capture_output=True,
            check=True,
        ).stdout
        for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo"))
    }
    assert len(pages) == 1
    assert pages.pop().decode() == report.render(verdict.groups(everything()))


@pytest.mark.parametrize(
    "records",
    [
        [record("baseline", 1, None)],
        [record("eagle3", 1, 150.0)],
        [record("baseline", 4, 100.0), record("eagle3", 4, 100.0)],
        [record(f"arm-{number}", level, 100.0 + number) for number in range(9) for level in (1, 2, 3, 4, 5, 6, 7, 8, 256)],
        [each for each in campaign() if each["kind"] == "profile"],
        [
            {
                **record("baseline", 1, 100.0),
                "release": {},
                "models": None,
                "workload": {},
                "host_fingerprint": None,
                "client": None,
                "times": {},
                "argv": None,
            }
        ],
    ],
    ids=["only failures", "no baseline", "all equal", "nine arms", "only profiles", "hardly anything known"],
)
def test_odd_runs_still_give_a_page(records):
    _, parsed = page(records)
    assert "baseline" in parsed.text or "arm-8" in parsed.text or "eagle3" in parsed.text


@pytest.fixture
def play(tmp_path):
    """Runs experiment_report for two hosts that don't exist, with the project's own settings; returns what Ansible printed."""

    def run(*options: str, **arguments) -> str:
        playbook = tmp_path / "play.yml"
        task = {"experiment_report": {"results": str(tmp_path / "results"), **arguments}}
        playbook.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "LC_ALL": "C.UTF-8",
        }
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "198.51.100.250,198.51.100.251,", *options, str(playbook)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return f"{done.stdout}\n{done.stderr}"

    return run


def test_it_works_once_for_all_hosts_without_reaching_any_and_tells_changes_truly(tmp_path, play):
    write(tmp_path / "results", [*campaign(FLASHINFER), *campaign(TRITON, host="gpu-2")])
    target = tmp_path / "results" / "report.html"
    rehearsed = play("--check")
    assert "changed=1" in rehearsed
    assert f"report (would be written): {target}" in rehearsed
    assert not target.exists()
    first = play()
    assert first.count("eagle3 is faster than baseline up to about") == 2
    assert ("changed=1" in first, first.count("198.51.100.251 ")) == (True, 0)
    assert first.partition("PLAY RECAP")[2].strip().splitlines()[-1] == f"report (written): {target}"
    before = target.stat().st_mtime_ns
    again = play()
    assert ("changed=0" in again, "report (unchanged)" in again) == (True, True)
    assert target.stat().st_mtime_ns == before


def test_no_record_is_a_message_and_not_a_failure(tmp_path, play):
    said = play()
    assert "There is no record below" in said
    assert ("failed=0" in said, "changed=0" in said) == (True, True)
    assert not (tmp_path / "results" / "report.html").exists()


def test_a_run_that_is_not_there_fails_with_the_near_name(tmp_path, play):
    write(tmp_path / "results", campaign(repeats=1))
    said = play(run_ids=["20260102T030405-exampel"])
    assert "failed=1" in said
    assert "20260102T030405-example" in said


def test_module_and_action_take_the_same_arguments():
    import experiment_report

    action = (PROJECT / "plugins/action/experiment_report.py").read_text()
    documented = yaml.safe_load(experiment_report.DOCUMENTATION)["options"]
    names = set(re.findall(r'^    "(\w+)": \{"type"', action, re.MULTILINE))
    assert names == set(documented)
    assert documented["title"]["default"] == report.DEFAULT_TITLE
