"""What GPUs of one kind need of SGLang, chosen from a table by version, model and parallelism, and what an arm may ask for by name.

The format of the table is docs/reference/gpu-settings.md. The controller reads its YAML; the plain values travel to the host, where the
same code reads them again. Standard library only: this runs on hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import read_json
from ansible.module_utils.aerie.serving import launch_checks
from ansible.module_utils.aerie.serving.server_flags import Argument, Layer, Parser, command_line, plain
from ansible.module_utils.aerie.specifiers import Specifier, Version
from ansible.module_utils.aerie.words import listing, near

ANY = "any"
REQUIRED, RECOMMENDED = "required", "recommended"
ATTENTION = ("mla", "mha", "dsa", "other")
RULE_KEYS = (
    "id",
    "capabilities",
    "versions",
    "when",
    "flags",
    "environment",
    "forbids",
    "patch_sets",
    "unless",
    "severity",
    "why",
    "cure",
    "source",
    "moot_since",
)
RULE_REQUIRED = ("id", "capabilities", "versions", "severity", "why", "source")
WHEN_KEYS = ("attention", "quantization", "moe", "architectures", "of", "speculation", "verify_backend", "tp_above", "flags", "environment")
UNLESS_KEYS = ("patch_set", "environment")
OPTION_KEYS = ("summary", "versions", "dtypes", "tp", "forbids", "flags", "environment", "why", "source")
OPTION_REQUIRED = ("summary", "versions", "why", "source")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
DTYPES = {"half": "float16", "float": "float32"}
PHASES = ("prefill-attention-backend", "decode-attention-backend")
"""Flags that mean what ``attention-backend`` says where they are left out."""
VERIFY_MODE = "speculative-attention-mode"
UNSET = "unset"
"""What ``verify_backend`` says where no flag names the backend, so that SGLang chooses it."""


@dataclass(frozen=True)
class ModelFacts:
    """What rules ask of a model: its attention, quantization, architecture, experts and data type."""

    architecture: str
    attention: str
    quantization: str | None
    moe: bool
    dtype: str | None

    @classmethod
    def of(cls, config: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> ModelFacts:
        """Read a config.json, and hf_quant_config.json (``extra``), in which ModelOpt keeps the quantization."""
        flat = launch_checks.text_config(config)
        return cls(
            architecture=launch_checks.architecture(config) or "",
            attention=_attention(flat),
            quantization=_quantization(flat, extra or {}),
            moe=any(isinstance(flat.get(key), int) and flat[key] > 1 for key in EXPERTS),
            dtype=_dtype(flat),
        )


def _attention(flat: Mapping[str, Any]) -> str:
    # configs/model_config.py, _derive_model_shapes: all models that it calls MLA have kv_lora_rank; DeepSeek-V4 (compress_ratios) and
    # sparse attention (index_topk) have backends of their own, which SGLang chooses.
    if flat.get("compress_ratios") is not None or flat.get("num_attention_heads") is None:
        return "other"
    if flat.get("kv_lora_rank") is None:
        return "mha"
    return "dsa" if flat.get("index_topk") is not None else "mla"


def _quantization(flat: Mapping[str, Any], extra: Mapping[str, Any]) -> str | None:
    config = flat.get("quantization_config") or flat.get("compression_config") or {}
    if not isinstance(config, Mapping):
        return None
    method = str(config.get("quant_method") or "").lower()
    kept = extra.get("quantization")
    algorithm = str(config.get("quant_algo") or (kept.get("quant_algo") if isinstance(kept, Mapping) else None) or "").upper()
    if "NVFP4" in algorithm or method == "modelopt_fp4":
        return "nvfp4"
    if method == "compressed-tensors" and "nvfp4" in str(config.get("format")):
        return "nvfp4_compressed"
    if method == "fp8" and config.get("weight_block_size"):
        return "fp8_block"
    return method or None


def _dtype(flat: Mapping[str, Any]) -> str:
    # configs/model_config.py, _get_and_verify_dtype: none is taken as float32, and float32 served as float16 (Gemma: bfloat16).
    written = str(flat.get("dtype") or flat.get("torch_dtype") or "float32")
    found = DTYPES.get(written, written)
    if found == "float32":
        return "bfloat16" if str(flat.get("model_type") or "").startswith("gemma") else "float16"
    return found


def read_model(path: Path, config: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of the model in ``path``; what is known of its ``config`` serves where the model isn't there yet."""

    def content(name: str) -> Mapping[str, Any]:
        try:
            value = read_json(path / name)
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, Mapping) else {}

    return ModelFacts.of(content("config.json") or config, content("hf_quant_config.json"))


@dataclass(frozen=True)
class Situation:
    """What a server is about to be: where, which SGLang, which models, and the flags (by argparse dest) and variables that were set."""

    version: Version
    capabilities: frozenset[str]
    target: ModelFacts | None
    draft: ModelFacts | None = None
    speculation: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    patch_sets: frozenset[str] = frozenset()

    @property
    def tp(self) -> int:
        size = str(self.flags.get("tp_size", 1))
        return int(size) if size.isdigit() else 1

    def models(self, of: Sequence[str]) -> list[ModelFacts]:
        by_name = {"target": self.target, "draft": self.draft if self.speculation else None}
        return [model for name in of if (model := by_name[name]) is not None]

    def sets(self, environment: Mapping[str, Sequence[str]]) -> bool:
        """Say whether each variable of ``environment`` has one of its values."""
        return all(str(self.environment.get(name)) in values for name, values in environment.items())


@dataclass(frozen=True)
class Rule:
    """One need of GPUs of ``capabilities``: what to set, what to refuse, for which versions and models, and where that is known from.

    A rule with ``patch_sets`` sets nothing: it recommends these to whoever speculates without them.
    """

    id: str
    capabilities: frozenset[str]
    versions: Specifier
    when: Mapping[str, Any]
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    forbids: Mapping[str, Any]
    patch_sets: tuple[str, ...]
    unless: Mapping[str, Any]
    severity: str
    why: str
    cure: str
    source: tuple[Mapping[str, Any], ...]
    moot_since: Mapping[str, Any] | None

    def applies(self, there: Situation, parser: Parser) -> bool:
        """Say whether the rule is about what is ``there``."""
        if not self.capabilities & there.capabilities or there.version not in self.versions:
            return False
        if self.unless and self._lifted(there):
            return False
        when = self.when
        if not any(self._fits(model) for model in there.models(when.get("of") or ["target"])) and any(
            key in when for key in ("attention", "quantization", "moe", "architectures")
        ):
            return False
        return (
            there.speculation is when.get("speculation", there.speculation)
            and ("verify_backend" not in when or target_verify_backend(parser, there.flags) in when["verify_backend"])
            and there.tp > when.get("tp_above", 0)
            and there.sets(when.get("environment") or {})
            and all(str(_effective(parser, there.flags, flag)[1]) in values for flag, values in (when.get("flags") or {}).items())
        )

    def missing_patch_sets(self, there: Situation) -> list[str]:
        """Return the recommended patch sets that are not there."""
        return [name for name in self.patch_sets if name not in there.patch_sets]

    def _lifted(self, there: Situation) -> bool:
        return self.unless.get("patch_set", "") in {"", *there.patch_sets} and there.sets(self.unless.get("environment") or {})

    def _fits(self, model: ModelFacts) -> bool:
        when = self.when
        return (
            model.attention in when.get("attention", [model.attention])
            and model.quantization in when.get("quantization", [model.quantization])
            and model.moe is when.get("moe", model.moe)
            and model.architecture.startswith(tuple(when.get("architectures", [""])))
        )

    @property
    def known_from(self) -> str:
        """Return the rule's first source in words."""
        return cited(self.source[0])


@dataclass(frozen=True)
class Option:
    """What an arm may ask for by ``name``: what it sets, and where it fits."""

    name: str
    summary: str
    versions: Specifier
    dtypes: tuple[str, ...]
    tp: tuple[int, ...]
    forbids: Mapping[str, Any]
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    why: str
    source: tuple[Mapping[str, Any], ...]

    def problems(self, there: Situation, parser: Parser) -> Iterator[str]:
        """Yield why the option can't be had in what is ``there``."""
        where = f"options: {self.name}"
        if there.version not in self.versions:
            yield f"{where}: is for SGLang {self.versions}, not for {there.version.text}: {self.why}"
            return
        written = str(there.flags.get("dtype") or "auto")
        dtype = there.target.dtype if written == "auto" and there.target else DTYPES.get(written, written)
        if self.dtypes and dtype not in (*self.dtypes, "auto"):
            yield f"{where}: serves {listing(self.dtypes, last='or')} only, and the model runs in {dtype}: set dtype to {self.dtypes[0]}"
        if self.tp and there.tp not in self.tp:
            yield f"{where}: serves tp-size {listing(self.tp, last='or')} only, not {there.tp}"
        for flag, values in self.forbids.items():
            name, value = _effective(parser, there.flags, flag)
            if _has(value, values):
                yield f"{where}: has no effect with --{name}: leave one of them out"


@dataclass(frozen=True)
class Table:
    """The rules and options of one profile."""

    rules: tuple[Rule, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, where: str = "gpu_settings.yml") -> Table:
        """Return the table that the values of its file mean; raise one error with everything that is wrong."""
        problems: list[str] = []
        if not isinstance(value, Mapping):
            raise AerieError(f"{where}: must be a mapping with rules and options")
        problems += [f"{key}: no such key{near(str(key), ('rules', 'options'))}" for key in value if key not in ("rules", "options")]
        rules = [rule for number, one in enumerate(value.get("rules") or [], 1) if (rule := _rule(one, number, problems))]
        ids = [rule.id for rule in rules]
        problems += [f"two rules are called {twice}" for twice in sorted({one for one in ids if ids.count(one) > 1})]
        options = {str(name): _option(str(name), one, problems) for name, one in (value.get("options") or {}).items()}
        raise_all(problems, where)
        return cls(tuple(rules), {name: option for name, option in options.items() if option})

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(capability for rule in self.rules for capability in rule.capabilities)


@dataclass(frozen=True)
class Recommendation:
    """A patch set that would make a server faster, by the rule that says so."""

    patch_set: str
    rule: Rule

    def __str__(self) -> str:
        rule = self.rule
        return f"patch set {self.patch_set} is recommended: {rule.why} ({rule.id}; {rule.known_from}): {rule.cure}"

    def as_dict(self) -> dict[str, str]:
        """Return plain values for records and results."""
        rule = self.rule
        return {
            "patch_set": self.patch_set,
            "id": rule.id,
            "why": rule.why,
            "cure": rule.cure,
            "source": rule.known_from,
        }


@dataclass(frozen=True)
class Choice:
    """The rules and options that are about one server, with the flags and variables that they set."""

    rules: tuple[Rule, ...]
    options: tuple[Option, ...]
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    option_flags: Mapping[str, Any]
    option_environment: Mapping[str, str]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    recommendations: tuple[Recommendation, ...] = ()

    def refusals(self, parser: Parser, flags: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
        """Yield each flag (by dest) whose value a rule forbids, where it was set, why, and the cure."""
        told = set()
        for rule in self.rules:
            for flag, values in rule.forbids.items():
                name, value = _effective(parser, flags, flag)
                if _has(value, values) and (rule.id, name) not in told:
                    told.add((rule.id, name))
                    shown = "" if value is True else f" {value}"
                    origin = origins.get(_dest(parser, name) or "", "flags")
                    yield f"{origin}: --{name}{shown}: not on {self._gpus(rule)}: {rule.why} ({rule.id}; {rule.known_from}): {rule.cure}"

    def contradictions(
        self, parser: Parser, flags: Mapping[str, Any], environment: Mapping[str, str], origins: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield each setting that goes against a required rule."""
        for rule in self.rules:
            if rule.severity != REQUIRED:
                continue
            for flag, wanted in rule.flags.items():
                dest = _dest(parser, flag)
                if dest and flags.get(dest) != wanted:
                    origin, value = origins.get(dest, "a setting"), flags.get(dest)
                    is_off = value is None or value is False
                    yield self._against(rule, origin, f"--{plain(flag)} {'left out' if is_off else value}", f"{wanted}")
            for name, wanted in rule.environment.items():
                if environment.get(name) != wanted:
                    yield self._against(rule, "environment", f"{name} {environment.get(name, 'taken away')}", wanted)

    def _against(self, rule: Rule, origin: str, found: str, wanted: str) -> str:
        return (
            f"{origin}: {found}: {self._gpus(rule)} need {wanted}: {rule.why} ({rule.id}; {rule.known_from}): "
            f"{rule.cure or 'leave it out, and the right value is set'}"
        )

    @staticmethod
    def _gpus(rule: Rule) -> str:
        return f"GPUs of compute capability {listing(sorted(rule.capabilities), last='or')}"

    def applied(self, parser: Parser, flags: Mapping[str, Any], environment: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return what is in force: each rule and option with those of its flags and variables that nothing overrode."""
        found = []
        everything: list[tuple[str, Rule | Option]] = [(rule.id, rule) for rule in self.rules]
        everything += [(option.name, option) for option in self.options]
        for name, one in everything:
            set_flags = {flag: value for flag, value in one.flags.items() if flags.get(_dest(parser, flag) or "") == value}
            set_variables = {variable: value for variable, value in one.environment.items() if environment.get(variable) == value}
            if set_flags or set_variables:
                found.append({"id": name, "flags": set_flags, "environment": set_variables, "why": one.why})
        return found


def choose(table: Table, there: Situation, parser: Parser, options: Iterable[str] = ()) -> Choice:
    """Return the rules of ``table`` for what is ``there``, and the ``options`` that were asked for."""
    problems: list[str] = []
    warnings: list[str] = []
    asked: list[Option] = []
    for name in options:
        option = table.options.get(name)
        if option is None:
            problems.append(unknown_option(name, table.options))
            continue
        found = list(option.problems(there, parser))
        problems += found
        asked += [] if found else [option]
    rules = tuple(rule for rule in table.rules if not rule.patch_sets and rule.applies(there, parser))
    flags: dict[str, Any] = {}
    environment: dict[str, str] = {}
    for rule in rules:
        for flag, value in rule.flags.items():
            if parser.find(flag) is None:
                warnings.append(f"{rule.id}: SGLang {parser.version} has no flag --{plain(flag)}, so it is not set: the table is wrong")
            elif flags.setdefault(flag, value) != value and _dest(parser, flag) not in there.flags:
                problems.append(f"{rule.id} wants --{plain(flag)} {value}, another rule {flags[flag]}: set it in sglang_server_flags")
        environment |= rule.environment
    return Choice(
        rules=rules,
        options=tuple(asked),
        flags=flags,
        environment=environment,
        option_flags={flag: value for option in asked for flag, value in option.flags.items()},
        option_environment={name: value for option in asked for name, value in option.environment.items()},
        problems=tuple(problems),
        warnings=tuple(warnings),
        recommendations=tuple(recommended(table, replace(there, flags=_with_rules(parser, flags, there)), parser)),
    )


def recommended(table: Table, there: Situation, parser: Parser) -> Iterator[Recommendation]:
    """Yield the patch sets that ``table`` recommends for what is ``there``, the rules' own flags among it."""
    for rule in table.rules:
        if rule.patch_sets and rule.applies(there, parser):
            yield from (Recommendation(name, rule) for name in rule.missing_patch_sets(there))


def recommended_unseen(table: Table, layers: Iterable[Layer], there: Situation) -> list[Recommendation]:
    """Return what is certain without a host: ``there`` lacks GPUs and models, ``layers`` are all flags.

    A rule is taken to be about the host's GPUs; one that depends on a model is passed over.
    """
    names = (*PHASES, "attention-backend", VERIFY_MODE)
    arguments = tuple(Argument((f"--{name}",), name.replace("-", "_"), None, None, None, False, "") for name in names)
    parser = Parser(there.version.text, arguments)
    flags = command_line(parser, layers).values
    seen = replace(there, capabilities=table.capabilities, flags=flags)
    return list(recommended(table, seen, parser))


def _with_rules(parser: Parser, flags: Mapping[str, Any], there: Situation) -> dict[str, Any]:
    # A flag that somebody set to null counts as the rules set it: for attention-backend, which is
    # all that is asked here, they set what SGLang chooses by itself.
    by_rules = {dest: value for flag, value in flags.items() if (dest := _dest(parser, flag))}
    return by_rules | dict(there.flags)


def target_verify_backend(parser: Parser, flags: Mapping[str, Any]) -> str:
    """Return the attention backend of target verify, by flags (by dest); ``unset`` where SGLang chooses it."""
    # hybrid_attn_backend.py, _select_backend: prefill's, unless speculative-attention-mode is decode.
    prefill, decode = PHASES
    mode = _effective(parser, flags, VERIFY_MODE)[1]
    backend = _effective(parser, flags, decode if mode == "decode" else prefill)[1]
    return UNSET if backend is None else str(backend)


def unknown_option(name: object, known: Iterable[str]) -> str:
    """Say that there is no option ``name``."""
    names = sorted(known)
    return f"options: no option {name!r}{near(str(name), names) or (f'; there is {listing(names)}' if names else ' in this profile')}"


def capabilities(gpus: Iterable[Mapping[str, Any]], used: Sequence[int] | None) -> frozenset[str]:
    """Return the compute capabilities of the GPUs that are ``used`` (None: all), of those that nvidia-smi lists."""
    return frozenset(
        str(gpu["compute_capability"]) for gpu in gpus if gpu.get("compute_capability") and (used is None or gpu.get("index") in used)
    )


def cited(source: Mapping[str, Any]) -> str:
    """Return a source in words."""
    if "report" in source:
        return str(source["report"])
    if "measurement" in source:
        return f"measured: {source['measurement']}"
    if "metadata" in source:
        return f"{source['wheel']} needs {source['metadata']}"
    place = source.get("file") or source.get("present") or source.get("absent")
    if source.get("function"):
        place = f"{place}, {source['function']}"
    return f"{source['wheel']}: {'no ' if 'absent' in source else ''}{place}"


def _dest(parser: Parser, flag: str) -> str | None:
    found = parser.find(flag)
    return found[1].dest if found else None


def _effective(parser: Parser, flags: Mapping[str, Any], flag: str) -> tuple[str, Any]:
    """Return the flag that decides what ``flag`` comes to, and its value."""
    for name in (flag, "attention-backend") if plain(flag) in PHASES else (flag,):
        dest = _dest(parser, name)
        if dest and flags.get(dest) is not None:
            return plain(name), flags[dest]
    return plain(flag), None


def _has(value: Any, forbidden: Any) -> bool:
    if value is None or value is False:
        return False
    return forbidden == ANY or str(value) in [str(one) for one in forbidden]


# Reading the table


def _rule(value: Any, number: int, problems: list[str]) -> Rule | None:
    where = f"rule {value['id']}" if isinstance(value, Mapping) and isinstance(value.get("id"), str) else f"rule {number}"
    if not isinstance(value, Mapping):
        problems.append(f"{where}: must be a mapping with {listing(RULE_KEYS)}")
        return None
    before = len(problems)
    _keys(where, value, RULE_KEYS, RULE_REQUIRED, problems)
    when, unless = value.get("when") or {}, value.get("unless") or {}
    _keys(f"{where}: when", when, WHEN_KEYS, (), problems)
    _keys(f"{where}: unless", unless, UNLESS_KEYS, (), problems)
    if value.get("severity") not in (REQUIRED, RECOMMENDED, None):
        problems.append(f"{where}: severity must be {REQUIRED} or {RECOMMENDED}, not {value['severity']!r}")
    patch_sets = value.get("patch_sets") or []
    actions = [key for key in ("flags", "environment", "forbids") if value.get(key)]
    if not actions and not patch_sets:
        problems.append(f"{where}: sets and forbids nothing")
    if patch_sets and (actions or value.get("severity") != RECOMMENDED or not value.get("cure")):
        problems.append(f"{where}: patch_sets: is for a rule of severity {RECOMMENDED} with a cure, which sets and forbids nothing")
    if value.get("forbids") and not value.get("cure"):
        problems.append(f"{where}: forbids, and names no cure")
    problems += [
        f"{where}: when: attention: {one!r} is not one of {listing(ATTENTION)}"
        for one in when.get("attention") or []
        if one not in ATTENTION
    ]
    versions = _specifier(where, value.get("versions"), problems)
    _variables(where, value.get("environment"), problems)
    if len(problems) > before or versions is None:
        return None
    return Rule(
        id=value["id"],
        capabilities=frozenset(str(one) for one in value["capabilities"]),
        versions=versions,
        when=when,
        flags=dict(value.get("flags") or {}),
        environment={name: str(text) for name, text in (value.get("environment") or {}).items()},
        forbids=dict(value.get("forbids") or {}),
        patch_sets=tuple(patch_sets),
        unless=unless,
        severity=value["severity"],
        why=str(value["why"]).strip(),
        cure=str(value.get("cure") or "").strip(),
        source=tuple(value["source"]),
        moot_since=value.get("moot_since"),
    )


def _option(name: str, value: Any, problems: list[str]) -> Option | None:
    where = f"option {name}"
    if not isinstance(value, Mapping):
        problems.append(f"{where}: must be a mapping with {listing(OPTION_KEYS)}")
        return None
    before = len(problems)
    _keys(where, value, OPTION_KEYS, OPTION_REQUIRED, problems)
    versions = _specifier(where, value.get("versions"), problems)
    _variables(where, value.get("environment"), problems)
    if len(problems) > before or versions is None:
        return None
    return Option(
        name=name,
        summary=str(value["summary"]).strip(),
        versions=versions,
        dtypes=tuple(value.get("dtypes") or ()),
        tp=tuple(value.get("tp") or ()),
        forbids=dict(value.get("forbids") or {}),
        flags=dict(value.get("flags") or {}),
        environment={key: str(text) for key, text in (value.get("environment") or {}).items()},
        why=str(value["why"]).strip(),
        source=tuple(value["source"]),
    )


def _keys(where: str, value: Mapping[str, Any], known: Sequence[str], required: Sequence[str], problems: list[str]) -> None:
    problems += [f"{where}: {key}: no such key{near(str(key), known)}" for key in value if key not in known]
    problems += [f"{where}: {key} is missing" for key in required if not value.get(key)]


def _specifier(where: str, value: Any, problems: list[str]) -> Specifier | None:
    try:
        return Specifier.parse(str(value))
    except AerieError as error:
        problems.append(f"{where}: versions: {error}")
        return None


def _variables(where: str, value: Any, problems: list[str]) -> None:
    problems += [
        f"{where}: environment: {name}: needs text in quotes, got {text!r}"
        for name, text in (value or {}).items()
        if not isinstance(text, str)
    ]
