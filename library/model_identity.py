#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: model_identity
short_description: Check models, bring them to the host and tell which they are
description:
  - Checks that every model of a catalog is whole, and reports what is wrong with any of them at once, before anything is written.
  - Brings models that are not on the host, from the controller, from another host by rsync over SSH, or from a hub at a pinned commit.
    Only what is missing comes, room on the disk is asked for first, and each file's size and hash are checked before a model is in place.
  - A model grows in a directory beside its own with C(.partial) added to the name; what a run that was cut off has received stays there,
    and the next one goes on from it.
  - Fetching is detached and survives a cut connection; the action plugin shows its progress.
  - Gives every model an identity from the content of its files, so that a benchmark can tell which weights it measured.
  - The identity of a model that did not change is not computed again, and a model that was fetched asks no network again.
  - Refuses a model that has another identity than the catalog asks for. What is on the host or the controller, or was fetched before, is
    refused before anything is written; what is fetched, as soon as all hashes are known, and always before it is in place.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root).
    type: path
    required: true
  models:
    description:
      - The catalog. By name, each model has C(source), which is V(host), V(controller), V(rsync) or V(hub), and what that needs;
        C(docs/reference/models.md) has all keys.
      - C(weights) set to false allows a directory without weight files, for C(load-format dummy).
      - C(identity) is the content that the model must have, as RV(models) tells it; left out, any will do.
    type: dict
    default: {}
  refresh:
    description: Ask the sources of V(rsync) again, even for models that are there, and fetch what differs.
    type: bool
    default: false
  bandwidth_mib:
    description: MiB a second that rsync takes at most, for each model. Left out, it is not bounded.
    type: float
  hub_endpoint:
    description:
      - The hub's address. Left out, it is C(HF_ENDPOINT) of the host's environment, or else the default of the library huggingface_hub.
    type: str
  hub_token:
    description: A token that may read the repositories. It goes to O(hub_endpoint) only.
    type: str
  python:
    description: The Python that the hub environment is made with.
    type: str
    default: python3
  wheels:
    description: Where the wheels of the hub environment are, a directory or the URL of a page, for hosts that reach no package index.
    type: str
  index_url:
    description: The package index for the hub environment; left out, the one that pip on the host is configured for.
    type: str
  extra_index_urls:
    description: Further package indexes for the hub environment.
    type: list
    elements: str
    default: []
  manifests:
    description: What the models of the controller are made of; the action plugin of this module fills it in.
    type: dict
    default: {}
  incoming:
    description: Where files that were sent have arrived; the action plugin of this module fills it in.
    type: dict
    default: {}
  addresses:
    description: How hosts of the inventory are reached that models come from; the action plugin of this module fills it in.
    type: dict
    default: {}
  hub_lock_text:
    description: The lock of the hub environment; the action plugin of this module fills it in.
    type: str
  arms:
    description: The arms, by name, whose drafts must fit the targets; C(sglang_server_arms).
    type: dict
    default: {}
  instances:
    description: The instances, by name, that say which model is served with which arm; C(sglang_server_instances).
    type: dict
    default: {}
  lease:
    description: The lease of this run on the host, as M(host_lease) returned it; renewed before anything is changed, and while it lasts.
    type: dict
attributes:
  check_mode:
    description: Says which models would be brought and how many bytes are missing, and what their identities will be where that is known.
    support: full
  diff_mode:
    description: Names the files that are brought.
    support: full
"""

EXAMPLES = r"""
- name: Check the models of this host
  model_identity:
    root: /opt/aerie
    models:
      llama: {path: /srv/models/Llama-3.1-8B-Instruct, source: host}
      llama-eagle3: {path: /home/ops/models/EAGLE3-LLaMA3.1-Instruct-8B, source: controller}

- name: Bring one from another host and one from a hub
  model_identity:
    root: /opt/aerie
    models:
      kimi-k2.5: {source: rsync, from: "ops@gpu-01:/srv/models/Kimi-K2.5", path: /data/models/Kimi-K2.5}
      kimi-k2.5-eagle3:
        source: hub
        repository: example/kimi-k2.5-eagle3
        revision: 0f3a51c2b9d80f3a51c2b9d80f3a51c2b9d80f3a

- name: Take no other files than those that were measured
  model_identity:
    root: /opt/aerie
    models:
      llama:
        source: host
        path: /srv/models/Llama-3.1-8B-Instruct
        identity: 3f0c5e2b9d77ab01c4de551f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b
"""

RETURN = r"""
models:
  description:
    - Every model by name. In check mode, the identity of one that would be fetched is null where its source does not tell all hashes ahead.
  returned: success
  type: dict
  sample:
    llama:
      path: /srv/models/Llama-3.1-8B-Instruct
      identity: 3f0c5e2b9d77ab01c4de551f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b
      bytes: 16060617592
      files: 9
      config: {architectures: [LlamaForCausalLM], hidden_size: 4096, model_type: llama, num_hidden_layers: 32, vocab_size: 128256}
missing:
  description: The files that the host lacked, or in check mode lacks, by model, of those that come from the controller.
  returned: success
  type: dict
  sample: {llama-eagle3: [model.safetensors]}
fetched:
  description:
    - What was fetched, by model, with the bytes that were missing, those that an earlier run had left, and those that were received.
    - In check mode what would be; what is not known before the library of the hub is installed is null.
  returned: success
  type: dict
  sample:
    kimi-k2.5-eagle3:
      from: example/kimi-k2.5-eagle3@0f3a51c2b9d80f3a51c2b9d80f3a51c2b9d80f3a
      to: /opt/aerie/models/kimi-k2.5-eagle3
      files: [config.json, model.safetensors]
      bytes: 2391808512
      there_bytes: 0
      received_bytes: 2391808512
      seconds: 41.2
unreachable:
  description: Sources that this host can't connect to, with name and port; the action plugin leads the connection over the controller.
  returned: when there are some
  type: dict
  sample: {kimi-k2.5: [gpu-01, 22]}
job:
  description: The directory of the detached work.
  returned: when models are fetched
  type: str
  sample: /opt/aerie/jobs/models-1748815200000000000-4242
again:
  description: The job only installs what listing a hub needs; the module is to be called again after it.
  returned: when that is so
  type: bool
  sample: true
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs, lease
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import environment, model_catalog, model_identity, model_sources
from ansible.module_utils.basic import AnsibleModule

HEADING = "sglang_models_catalog"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "models": {"type": "dict", "default": {}},
            "refresh": {"type": "bool", "default": False},
            "bandwidth_mib": {"type": "float"},
            "hub_endpoint": {"type": "str"},
            "hub_token": {"type": "str", "no_log": True},
            "python": {"type": "str", "default": "python3"},
            "wheels": {"type": "str"},
            "index_url": {"type": "str"},
            "extra_index_urls": {"type": "list", "elements": "str", "default": []},
            "manifests": {"type": "dict", "default": {}},
            "incoming": {"type": "dict", "default": {}},
            "addresses": {"type": "dict", "default": {}},
            "hub_lock_text": {"type": "str"},
            "arms": {"type": "dict", "default": {}},
            "instances": {"type": "dict", "default": {}},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**converge(module))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")


def converge(module: AnsibleModule) -> dict[str, Any]:
    """Look at everything, take in what has arrived, and fetch the rest in a detached job."""
    params = module.params
    paths, catalog = HostPaths(Path(params["root"])), params["models"]
    raise_all(model_catalog.problems(catalog), HEADING)
    given = model_sources.Given(
        paths=paths,
        addresses=params["addresses"],
        refresh=params["refresh"],
        bandwidth_mib=params["bandwidth_mib"],
        endpoint=params["hub_endpoint"],
        token=params["hub_token"],
        lock_text=params["hub_lock_text"],
        python=params["python"],
        packages=environment.Source(params["wheels"], params["index_url"], tuple(params["extra_index_urls"])),
    )
    there, wanted, absent, found = local(catalog, params["manifests"], paths)
    survey = model_sources.survey(catalog, given)
    found += survey.problems
    if survey.unreachable and not found:
        return {"changed": False, "unreachable": survey.unreachable}
    raise_all([*found, *(f"{name}: {model_sources.unreachable_text(*place)}" for name, place in survey.unreachable.items())], HEADING)
    if survey.unlisted and not module.check_mode:
        return prepare_hub(given, params["lease"])
    for note in model_sources.notes(survey):
        module.warn(note)

    known = {**there, **wanted, **survey.there}
    configs = {name: model.config for name, model in known.items()} | survey.configs()
    raise_all(model_identity.fit_problems(configs, params["arms"], params["instances"]), "these models don't go together")
    fetching = model_sources.would_fetch(survey, catalog, given)
    missing = {name: files for name, files in absent.items() if files}
    lines = [f"{name}: {file}\n" for name, files in missing.items() for file in files] + model_sources.diff_lines(fetching)
    result = {"changed": bool(missing or fetching), "missing": missing, "diff": {"before": "", "after": "".join(lines)}}
    incoming: dict[str, dict[str, str]] = params["incoming"]
    if not module.check_mode:
        if incoming or survey.plans:
            lease.renew_if_given(paths.lease, params["lease"])
        for name, files in incoming.items():
            model_identity.receive(wanted[name].path, wanted[name], {file: Path(path) for file, path in files.items()})
            absent[name] = []
        for name, model in known.items():
            if not absent.get(name):
                model_identity.remember(model, model_identity.cache_of(paths))
        if survey.plans and not any(absent.values()):
            return {
                "changed": True,
                "job": start(survey, given, catalog, known, params["lease"]),
                "missing": missing,
                "diff": result["diff"],
            }
    values = {name: model.as_dict() for name, model in known.items()} | model_sources.foretold(survey, catalog, given)
    return result | {"models": {name: values[name] for name in catalog}, "fetched": fetching}


def local(
    catalog: dict[str, Any], manifests: dict[str, Any], paths: HostPaths
) -> tuple[dict[str, model_identity.Model], dict[str, model_identity.Model], dict[str, list[str]], list[str]]:
    """Return the models of the host, those that the controller has, which files the host lacks of these, and all problems."""
    cache = model_identity.cache_of(paths)
    there: dict[str, model_identity.Model] = {}
    wanted: dict[str, model_identity.Model] = {}
    absent: dict[str, list[str]] = {}
    found: list[str] = []
    for name, entry in catalog.items():
        if entry["source"] == "host":
            problems = model_identity.problems(Path(entry["path"]), weights=entry.get("weights", True))
            found += [f"{name}: {problem}" for problem in problems]
            if not problems:
                there[name] = model_identity.read(Path(entry["path"]), cache)
                found += other_model(name, entry, there[name].path, there[name], "put that one there")
        elif entry["source"] == "controller" and name not in manifests:
            found.append(f"{name}: only the action plugin of model_identity can send it: is action_plugins of ansible.cfg in force?")
        elif entry["source"] == "controller":
            wanted[name] = model_identity.of_manifest(model_catalog.destination(paths, name, entry), manifests[name])
            found += other_model(name, entry, f"{entry['path']} on the controller", wanted[name], "name that one's directory")
            try:
                absent[name] = model_identity.missing(wanted[name].path, wanted[name], cache)
            except AerieError as error:
                found.append(f"{name}: {error}")
    return there, wanted, absent, found


def other_model(name: str, entry: dict[str, Any], where: object, model: model_identity.Model, cure: str) -> list[str]:
    return [f"{name}: {problem}" for problem in model_identity.other_model(where, model.identity, entry.get("identity"), cure)]


def prepare_hub(given: model_sources.Given, held: dict[str, Any] | None) -> dict[str, Any]:
    """Install in a detached job what listing a hub needs."""
    lease.renew_if_given(given.paths.lease, held)
    job = jobs.new_directory(given.paths.jobs, "models")

    def work(progress: jobs.Progress) -> dict[str, Any]:
        given.make_hub_environment(progress)
        return {}

    jobs.start(job, work)
    return {"changed": True, "job": str(job), "again": True}


def start(
    survey: model_sources.Survey,
    given: model_sources.Given,
    catalog: dict[str, Any],
    known: dict[str, model_identity.Model],
    held: dict[str, Any] | None,
) -> str:
    """Fetch in a detached job; return its directory."""
    job = jobs.new_directory(given.paths.jobs, "models")

    def work(progress: jobs.Progress) -> dict[str, Any]:
        fetched = model_sources.fetch_all(survey, given, progress, lambda: lease.renew_if_given(given.paths.lease, held))
        cache = model_identity.cache_of(given.paths)
        placed = {name: model_identity.read(plan.wanted.directory, cache) for name, plan in survey.plans.items()}
        models = {**known, **placed}
        return {"fetched": fetched, "models": {name: models[name].as_dict() for name in catalog}}

    jobs.start(job, work)
    return str(job)


if __name__ == "__main__":
    main()
