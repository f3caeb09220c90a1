#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: model_identity
short_description: Check models, bring them to the host and tell which they are
description:
  - Checks that every model of a catalog is whole, and reports what is wrong with any of them at once, before anything is written.
  - Sends models that lie on the controller, only the files that the host lacks or has otherwise.
  - Gives every model an identity from the content of its files, so that a benchmark can tell which weights it measured.
  - The identity of a model that did not change is not computed again.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root).
    type: path
    required: true
  models:
    description:
      - The catalog. By name, each model has C(path), and C(source), which is V(host) or V(controller).
      - C(weights) set to false allows a directory without weight files, for C(load-format dummy).
    type: dict
    default: {}
  manifests:
    description: What the models of the controller are made of; the action plugin of this module fills it in.
    type: dict
    default: {}
  incoming:
    description: Where files that were sent have arrived; the action plugin of this module fills it in.
    type: dict
    default: {}
  arms:
    description: The arms, by name, whose drafts must fit the targets; C(sglang_server_arms).
    type: dict
    default: {}
  instances:
    description: The instances, by name, that say which model is served with which arm; C(sglang_server_instances).
    type: dict
    default: {}
  lease:
    description: The lease of this run on the host, as M(host_lease) returned it; renewed before anything is changed.
    type: dict
attributes:
  check_mode:
    description: Says which models would be sent, and what their identities will be.
    support: full
  diff_mode:
    description: Names the files that are sent.
    support: full
"""

EXAMPLES = r"""
- name: Check the models of this host
  model_identity:
    root: /opt/aerie
    models:
      llama: {path: /srv/models/Llama-3.1-8B-Instruct, source: host}
      llama-eagle3: {path: /home/ops/models/EAGLE3-LLaMA3.1-Instruct-8B, source: controller}
"""

RETURN = r"""
models:
  description: Every model by name.
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
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import lease
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import model_identity
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "models": {"type": "dict", "default": {}},
            "manifests": {"type": "dict", "default": {}},
            "incoming": {"type": "dict", "default": {}},
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
    """Take in what has arrived, then tell what is there and what is missing."""
    params = module.params
    paths, catalog = HostPaths(Path(params["root"])), params["models"]
    cache = model_identity.cache_of(paths)
    wanted = {
        name: model_identity.of_manifest(model_identity.target(paths, catalog[name]["path"]), value)
        for name, value in params["manifests"].items()
    }
    found = model_identity.catalog_problems(catalog)
    raise_all(found, "sglang_models_catalog")
    for name, entry in catalog.items():
        if entry["source"] == "host":
            problems = model_identity.problems(Path(entry["path"]), weights=entry.get("weights", True))
            found += [f"{name}: {problem}" for problem in problems]
        elif name not in wanted:
            found.append(f"{name}: only the action plugin of model_identity can send it: is action_plugins of ansible.cfg in force?")
    absent: dict[str, list[str]] = {}
    for name, model in wanted.items():
        try:
            absent[name] = model_identity.missing(model.path, model, cache)
        except AerieError as error:
            found.append(f"{name}: {error}")
    raise_all(found, "sglang_models_catalog")
    models = {name: wanted.get(name) or model_identity.read(Path(entry["path"]), cache) for name, entry in catalog.items()}
    configs = {name: model.config for name, model in models.items()}
    raise_all(model_identity.fit_problems(configs, params["arms"], params["instances"]), "these models don't go together")
    changed = any(absent.values())
    incoming: dict[str, dict[str, str]] = params["incoming"]
    if incoming and not module.check_mode:
        lease.renew_if_given(paths.lease, params["lease"])
        for name, files in incoming.items():
            model_identity.receive(wanted[name].path, wanted[name], {file: Path(path) for file, path in files.items()})
            absent[name] = []
    if not module.check_mode:
        for name, model in models.items():
            if not absent.get(name):
                model_identity.remember(model, cache)
    lines = [f"{name}: {file}\n" for name, files in absent.items() for file in files]
    return {
        "changed": changed,
        "missing": {name: files for name, files in absent.items() if files},
        "models": {name: model.as_dict() for name, model in models.items()},
        "diff": {"before": "", "after": "".join(lines)},
    }


if __name__ == "__main__":
    main()
