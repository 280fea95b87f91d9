"""Imports the precision rules of other tools as policies: qwix, Megatron, Transformer Engine and ModelOpt.

Each reader yields rules in the order of the tool's file. What a policy cannot say becomes a comment of the rule that it
concerns, and a finding.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policyc.base.text import escape_controls
from policyc.language.formatter import format_text

_ANY = "\0"  # in a pattern: any characters, also separators
_MAX_SELECTORS = 64  # of one pattern
_BLOCKS = "* where block and (attention or mlp)"

Settings = Mapping[str, Any]


class ImportFailed(ValueError):
    """A file is not what its tool writes."""


@dataclass(slots=True)
class ImportedRule:
    """A rule of another tool: its pattern as selectors, the recipe, and what a policy cannot say of it.

    Without selectors, the recipe is a comment.
    """

    selectors: str
    recipe: str
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPolicy:
    """The text of a policy, and what could not be imported."""

    text: str
    findings: tuple[str, ...]


def import_policy(tool: str, path: Path, renames: Mapping[str, str]) -> ImportedPolicy:
    """Imports a file of a tool.

    `renames` replace names of the tool's modules by patterns of the program's. Raises ImportFailed or OSError.
    """
    text = path.read_text(encoding="utf-8")
    rules = list(TOOLS[tool](text, path))
    if not rules:
        raise ImportFailed(f"'{path.name}' has no rule of {tool}")
    lines = [f"# Imported from {escape_controls(path.name)}, of {tool}."]
    for rule in rules:
        lines += [f"# no equivalent: {escape_controls(finding)}" for finding in rule.findings]
        if rule.selectors:
            where = "" if " where " in rule.selectors or tool == "qwix" else " where weight"
            lines.append(f"{_rename(rule.selectors, renames)}{where} -> {rule.recipe}")
        elif rule.recipe:
            lines.append(f"# {escape_controls(rule.recipe)}")
    formatted = format_text("\n".join(lines) + "\n")
    if formatted is None:
        raise ImportFailed(f"a name in '{path.name}' is not possible in a policy: rename it with --rename")
    findings = dict.fromkeys(finding for rule in rules for finding in rule.findings)
    return ImportedPolicy(text=formatted, findings=tuple(findings))


def _rename(selectors: str, renames: Mapping[str, str]) -> str:
    for name, new in renames.items():
        selectors = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", new.replace("\\", r"\\"), selectors)
    return selectors


# ---- patterns


def glob_selectors(pattern: str) -> str:
    """The selectors of a pattern of `fnmatch` over dotted names, whose `*` crosses dots."""
    parts: list[tuple[str, ...]] = []
    for token in re.findall(r"\[[^\]]*\]|.", pattern):
        if token.startswith("[") and len(token) > 2:
            if not token[1:-1].isalnum():
                raise ImportFailed(f"the character class {token}")
            parts.append(tuple(token[1:-1]))
        else:
            parts.append((_ANY if token == "*" else token,))
    return _as_selectors(parts, ".")


_REGEX_TOKEN = re.compile(r"""
    (?P<any>\.[*+]) | (?P<segment>(?:\[\^/\]|\\w|\[\\w\]|\\d|\[0-9\])[*+])
    | \((?:\?:)?(?P<group>[^()]*)\) | (?P<one>\.) | \\(?P<escaped>[^\w\s]) | (?P<plain>[\w/~-])
""", re.VERBOSE)  # fmt: skip


def regex_selectors(pattern: str) -> str:
    """The selectors of a regular expression that must match a whole path with slashes. Raises ImportFailed."""
    try:
        return _as_selectors([tuple(_expand_regex(pattern.removeprefix("^").removesuffix("$")))], "/")
    except ValueError as error:
        raise ImportFailed(f"the regular expression {pattern!r}, from {error.args[0]!r} on") from None


def _expand_regex(text: str) -> Iterator[str]:
    """Yields the patterns of all alternatives. Raises ValueError with the part that cannot be translated."""
    for alternative in re.split(r"\|(?![^()]*\))", text):
        parts: list[tuple[str, ...]] = []
        rest = alternative
        while rest:
            token = _REGEX_TOKEN.match(rest)
            if token is None:
                raise ValueError(rest)
            rest = rest[token.end() :]
            if token["group"] is not None:
                parts.append(tuple(_expand_regex(token["group"])))
            else:
                wild = {"any": _ANY, "segment": "?*", "one": "?"}.get(str(token.lastgroup))
                parts.append((wild or token["escaped"] or token["plain"],))
        yield from map("".join, itertools.product(*parts))


def _as_selectors(parts: Sequence[tuple[str, ...]], separator: str) -> str:
    texts = ["".join(choice).replace(separator, ".") for choice in itertools.product(*parts)]
    texts = list(dict.fromkeys(selector for text in texts for selector in _cross_dots(text)))
    if len(texts) > _MAX_SELECTORS:
        raise ImportFailed(f"a pattern with {len(texts)} alternatives")
    return ", ".join(texts)


def _cross_dots(text: str) -> Iterator[str]:
    """The selectors of a pattern in which `_ANY` crosses dots, and whose first segment is the first of a name."""
    text = re.sub(f"{_ANY}+", _ANY, text)
    if text == _ANY:
        yield "*"
        return
    is_anchored = not text.startswith(_ANY)
    text = text.removeprefix(f"{_ANY}.") if text.startswith(f"{_ANY}.") else text
    text = text.removesuffix(f".{_ANY}")  # a selector takes everything in its scope
    text = re.sub(rf"(?<=\.){_ANY}(?=\.)", "?*.*", text)
    text = re.sub(rf"(?<=\.){_ANY}(?=[^.])", "*.*", text)
    text = re.sub(rf"(?<=[^.]){_ANY}(?=\.)", "*.*", text)
    first, last = text.startswith(_ANY), text.endswith(_ANY)
    inner = text.strip(_ANY).split(_ANY)
    for joints in itertools.product(
        ("*", "*.*.*"), repeat=len(inner) - 1
    ):  # within a segment, or across some
        joined = "".join(itertools.chain.from_iterable(zip(inner, (*joints, ""), strict=True)))
        yield f"{'^' if is_anchored else ''}{'*' if first else ''}{joined}{'*' if last else ''}"


# ---- qwix


_QWIX_FORMATS = {"float8_e4m3fn": "fp8", "float8_e4m3": "fp8", "float8_e5m2": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4",
                 "nvfp4": "nvfp4"}  # fmt: skip
_BLOCK_SIZES = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
_QWIX_HARMLESS = {
    "op_names": ((), [], None), "act_static_scale": (None, False), "weight_calibration_method": ("absmax",),
    "act_calibration_method": (None, "absmax"), "bwd_calibration_method": ("absmax",), "tile_size": (None,),
    "bwd_weight_grad_tile_size": (None,), "act_batch_axes": ((0,), [0]), "channelwise_noise_axes": ((0,), [0]),
    "additional_qt_config": (None,),
}  # fmt: skip
"""Settings whose other values a policy cannot say."""


def _read_qwix(text: str, path: Path) -> Iterator[ImportedRule]:
    found = [call for _, call in _read_calls(text, ("QuantizationRule", "QtRule"), path)]
    for number, rule in reversed(
        list(enumerate(found, start=1))
    ):  # the first match decides; in policies, the last
        name = f"rule {number} ({rule.get('module_path', '.*')})"
        own = {"tile_size": _BLOCK_SIZES.get(str(rule.get("weight_qtype")))}
        findings = [
            f"{name}: {key}={value!r}"
            for key, value in rule.items()
            if value not in (*_QWIX_HARMLESS.get(key, (value,)), own.get(key))
        ]
        try:
            selectors = regex_selectors(rule.get("module_path", ".*"))
        except ImportFailed as error:
            yield ImportedRule("", "", [*findings, f"{name}: {error}"])
            continue
        recipe, more = _qwix_recipe(rule)
        yield ImportedRule(selectors, recipe, [*findings, *(f"{name}: {finding}" for finding in more)])


def _qwix_recipe(rule: Settings) -> tuple[str, list[str]]:
    weight, activation, gradient = (rule.get(f"{role}_qtype") for role in ("weight", "act", "bwd"))
    if weight is None:
        return "keep", []
    formats = [_QWIX_FORMATS.get(str(each)) for each in (weight, activation)]
    if None in formats or formats[0] != formats[1] or "e5m2" in f"{weight}{activation}":
        return "keep", [f"weights in {weight} with activations in {activation}"]
    format = str(formats[0])
    options: list[str] = []
    findings = []
    if format == "fp8" and not rule.get("disable_channelwise_axes"):
        options.append("outer=row")
    if gradient is None:
        options.append("backward=dequantized")  # residuals keep their codes, the gradient its type
    elif _QWIX_FORMATS.get(str(gradient)) != format:
        return f"split(fprop={_call(format, options)}, dgrad=bf16, wgrad=bf16)", [f"gradients in {gradient}"]
    elif format == "fp8" and "e4m3" in str(gradient):
        options.append("grad=e4m3")
    if (rounding := rule.get("bwd_stochastic_rounding")) and format in ("nvfp4", "mxfp4"):
        options.append("sr=grad")
    elif rounding:
        findings.append(f"bwd_stochastic_rounding={rounding!r} of {format}")
    return _call(format, options), findings


def _call(format: str, options: Iterable[str]) -> str:
    given = ", ".join(options)
    return f"{format}({given})" if given else format


def _read_calls(text: str, names: Sequence[str], path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The keyword arguments of all calls of some names in Python code, in order; or the objects of a list in JSON."""
    try:
        data = json.loads(text)
        return [(names[0], dict(item)) for item in data]
    except (TypeError, ValueError):
        pass
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ImportFailed(
            f"'{path.name}' is neither JSON nor Python: line {error.lineno}: {error.msg}"
        ) from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) in names]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    for call in calls:
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ImportFailed(f"'{path.name}', line {call.lineno}: expected arguments by name")
    return [(_last_name(c.func), {str(k.arg): _constant(k.value, path) for k in c.keywords}) for c in calls]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.expr, path: Path) -> Any:
    """The value of a literal; the last name of `jnp.int8` or `Format.HYBRID`."""
    if name := _last_name(node):
        return name
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ImportFailed(
            f"'{path.name}', line {node.lineno}: '{ast.unparse(node)}' is not a constant"
        ) from None


# ---- Transformer Engine


_TE_VARIABLES = {
    "NVTE_NVFP4_DISABLE_RHT": "disable_rht",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "disable_stochastic_rounding",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "disable_2d_quantization",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "row_scaled_activation",
    "NVTE_NVFP4_4OVER6": "nvfp4_4over6",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "nvfp4_4over6_e4m3_use_256",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "nvfp4_4over6_err_mode",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "use_power_2_scales",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "use_f32_scales",
    "NVTE_BACKWARD_OVERRIDE": "backward_override",
}
_TE_NAMES = {
    "te_fp8_delayedscaling": "DelayedScaling", "te_fp8_currentscaling": "Float8CurrentScaling", "te_mxfp8":
    "MXFP8BlockScaling", "te_nvfp4": "NVFP4BlockScaling", "te_nvfp4_no_rht": "NVFP4BlockScaling", "delayed":
    "DelayedScaling", "tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8":
    "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling",
}  # fmt: skip
"""The recipes of Transformer Engine by their names in MaxText and in Megatron."""


def _read_te(text: str, path: Path) -> Iterator[ImportedRule]:
    variables = dict(re.findall(r"^\s*(?:export\s+)?(NVTE_\w+)\s*=\s*['\"]?([^\s'\"#]*)", text, re.MULTILINE))
    recipes = sorted({*_TE_NAMES.values()})
    rest = re.sub(r"^\s*(?:export\s+)?NVTE_.*$", "", text, flags=re.MULTILINE)
    calls = _read_calls(rest, recipes, path) if "(" in rest else []
    names = [word for word in re.findall(r"\w+", rest) if word in {*recipes, *_TE_NAMES}]
    if not calls and names:
        calls = [(_TE_NAMES.get(names[0], names[0]), {"disable_rht": True} if "no_rht" in names[0] else {})]
    elif not calls and any(name.startswith("NVTE_NVFP4") for name in variables):
        calls = [("NVFP4BlockScaling", {})]
    if len(calls) != 1:
        raise ImportFailed(f"'{path.name}' must name one recipe of Transformer Engine, not {len(calls)}")
    ((name, settings),) = calls
    known = {_TE_VARIABLES[n]: _as_flag(value) for n, value in variables.items() if n in _TE_VARIABLES}
    recipe, findings = _te_recipe(name, {**known, **settings})
    findings += [f"{n}={value}" for n, value in variables.items() if n not in _TE_VARIABLES]
    yield ImportedRule(_BLOCKS, recipe, findings)


def _as_flag(value: str) -> Any:
    return value == "1" if value in ("0", "1") else value


def _te_recipe(name: str, settings: Settings) -> tuple[str, list[str]]:
    """The recipe of one of Transformer Engine's, and what a policy cannot say of it."""
    rest = {key: value for key, value in settings.items() if value not in (False, None)}
    backward = rest.pop("backward_override", None)
    element = str(
        rest.pop("fp8_format", "HYBRID" if "8C" in name or name == "DelayedScaling" else "E4M3")
    ).upper()
    rest.pop("fp4_format", None)
    findings: list[str] = []
    options: list[str] = []
    if name in ("DelayedScaling", "Float8CurrentScaling"):
        format = "fp8"
        options += ["grad=e4m3"] * (element == "E4M3")
        if name == "DelayedScaling":
            findings.append("DelayedScaling: scales come from the current maximum, not from a history")
            rest = {key: rest[key] for key in rest.keys() & {"fp8_dpa", "fp8_mha", "margin"}}
    elif name == "MXFP8BlockScaling":
        format = "mxfp8"
        findings += [f"{name}: fp8_format=HYBRID: gradients are in E4M3"] * (element == "HYBRID")
    elif name == "NVFP4BlockScaling":
        format = "nvfp4"
        is_quantized = backward is None
        options += ["rht=wgrad"] * (not rest.pop("disable_rht", False) and is_quantized)
        options += ["sr=grad"] * (not rest.pop("disable_stochastic_rounding", False) and is_quantized)
        options += ["scale2d=weights"] * (not rest.pop("disable_2d_quantization", False))
        four, bound = rest.pop("nvfp4_4over6", "none"), rest.pop("nvfp4_4over6_e4m3_use_256", "all")
        error = str(rest.pop("nvfp4_4over6_err_mode", "MAE")).lower()
        if four == "all" and bound in ("all", "none"):
            options += [
                "scale=four_over_six",
                f"scale_error={error}",
                f"scale_bound={256 if bound == 'all' else 448}",
            ]
        elif four != "none":
            findings.append(f"{name}: nvfp4_4over6={four} with nvfp4_4over6_e4m3_use_256={bound}")
    else:
        return "keep", [f"{name}: {'FP8 in blocks of 128' if 'Block' in name else 'this recipe'}"]
    findings += [f"{name}: {key}={value}" for key, value in rest.items()]
    if backward == "dequantized":
        options.append("backward=dequantized")
    elif backward is not None:
        return f"split(fprop={_call(format, options)}, dgrad=bf16, wgrad=bf16)", findings
    return _call(format, options), findings


# ---- Megatron


def _read_megatron(text: str, path: Path) -> Iterator[ImportedRule]:
    data = _read_yaml(text, path)
    if not isinstance(data, dict) or not isinstance(data.get("matchers"), dict):
        raise ImportFailed(f"'{path.name}' has no mapping 'matchers'")
    for name, matcher in reversed(data["matchers"].items()):  # the first match decides; in policies, the last
        if not matcher.get("enabled", False):
            continue
        findings: list[str] = []
        try:
            if matcher.get("type") != "glob":
                raise ImportFailed(f"type {matcher.get('type')!r}")
            selectors = glob_selectors(str(matcher["pattern"]))
            recipe, findings = _megatron_recipe(
                data.get("configs", {}).get(matcher["config"]), str(matcher["config"])
            )
        except KeyError as error:
            raise ImportFailed(f"'{path.name}': the matcher '{name}' has no {error.args[0]!r}") from None
        except ImportFailed as error:
            selectors, recipe, findings = "", "", [f"matcher '{name}': {error}"]
        yield ImportedRule(selectors, recipe, findings)


def _megatron_recipe(config: Any, name: str) -> tuple[str, list[str]]:
    where = f"config '{name}'"
    if not isinstance(config, dict) or config.get("transformer_engine_config_type") != "TEQuantizationParams":
        raise ImportFailed(f"{where} is not of type TEQuantizationParams")
    settings = dict(config.get("training_recipe") or {})
    findings = [f"{where}: evaluation_recipe"] if "evaluation_recipe" in config else []
    kinds = [settings.pop(f"{kind}_quantization_recipe", None) for kind in ("fp8", "fp4")]
    for key in ("override_quantized_autocast", "override_nonquantized_autocast", "tp_only_amax_red"):
        if settings.get(key) is not None:
            findings.append(f"{where}: {key}={settings[key]}: the rule holds always")
        settings.pop(key, None)
    kind = next((str(k) for k in kinds if k), None)
    if kind is None:
        return "bf16", findings
    recipe, more = _te_recipe(
        _TE_NAMES.get(kind, kind), {"fp8_format": "e4m3", **settings} if kinds[0] else settings
    )
    return recipe, [*findings, *(f"{where}: {finding}" for finding in more)]


# ---- ModelOpt


def _read_modelopt(text: str, path: Path) -> Iterator[ImportedRule]:
    data = _read_yaml(text, path)
    content = data.get("quantize", data) if isinstance(data, dict) else {}
    imports = data.get("imports", {}) if isinstance(data, dict) else {}
    if "$import" in content:
        content, imports, path = _find_unit(imports, content["$import"], path)
    if "quant_cfg" not in content:
        raise ImportFailed(f"'{path.name}' has no 'quant_cfg'")
    algorithm = content.get("algorithm")
    if algorithm not in (None, "max"):
        yield ImportedRule("", "", [f"algorithm={algorithm}: scales come from the current maximum"])
    entries = list(_expand_imports(content["quant_cfg"], imports, path))
    for (pattern, _), group in itertools.groupby(
        entries, key=lambda entry: (_module_pattern(entry[0]), entry[2])
    ):
        yield _modelopt_rule(pattern, list(group))


def _module_pattern(quantizer: str) -> str:
    """The pattern of the modules whose quantizers a pattern matches."""
    return re.sub(r"\.?(weight|input)_quantizer$", "", quantizer) or "*"


def _modelopt_rule(pattern: str, entries: Sequence[tuple[str, Settings | None, str]]) -> ImportedRule:
    findings: list[str] = []
    formats: dict[str, str] = {}
    is_disabled = False
    for quantizer, settings, parent in entries:
        if parent and settings is None and not re.search("Linear|Conv", parent):
            return ImportedRule("", f"{parent} is no site")
        if parent or "bmm_quantizer" in quantizer or quantizer.endswith("output_quantizer"):
            findings.append(
                f"{quantizer}: {f'parent_class={parent}' if parent else 'not an operand of a linear'}"
            )
        elif settings is None:
            is_disabled = True
            formats.clear()
        else:
            role = next((r for r in ("weight", "input") if quantizer.endswith(f"{r}_quantizer")), "")
            recipe, more = _modelopt_format(settings)
            findings += [f"{quantizer}: {finding}" for finding in more]
            formats |= dict.fromkeys([role] if role else ["weight", "input"], recipe)
    if not formats and not is_disabled:
        return ImportedRule("", "", findings)
    recipe = "keep"
    if formats and (len(formats) < 2 or len({*formats.values()}) > 1):
        described = " and ".join(
            f"{role}s in {recipe or 'another format'}" for role, recipe in formats.items()
        )
        findings.append(f"{pattern}: only {described}")
    elif formats and formats["weight"]:
        format, _, options = formats["weight"].partition(" ")
        recipe = _call(format, [*filter(None, [options]), "backward=dequantized"])
    try:
        return ImportedRule(glob_selectors(pattern), recipe, findings)
    except ImportFailed as error:
        return ImportedRule("", "", [*findings, f"{pattern}: {error}"])


def _modelopt_format(settings: Settings) -> tuple[str, list[str]]:
    """The format of a quantizer, with its option after a space; empty if there is none."""
    known = {"num_bits", "axis", "block_sizes", "effective_bits", "enable", "fake_quant"}
    findings = [f"{key}={value}" for key, value in settings.items() if key not in known]
    blocks = dict(settings.get("block_sizes") or {})
    bits, scale = (_element(value) for value in (settings.get("num_bits"), blocks.pop("scale_bits", None)))
    size, axis = next((v for k, v in blocks.items() if str(k) == "-1"), None), settings.get("axis")
    option = " scale=four_over_six" if blocks.get("four_over_six") else ""
    if blocks.get("type") == "static":
        findings.append("block_sizes.type=static: scales are computed in each step")
    match bits, size, scale:
        case "e2m1", 16, "e4m3":
            return f"nvfp4{option}", findings
        case "e2m1" | "e4m3", 32, "e8m0":
            return "mxfp4" if bits == "e2m1" else "mxfp8", findings
        case "e4m3", None, "" if axis in (None, 0):
            return "fp8" if axis is None else "fp8 outer=row", findings
    return "", [
        *findings,
        f"num_bits={settings.get('num_bits')} with block_sizes={settings.get('block_sizes')}",
    ]


def _element(bits: Any) -> str:
    return "e{}m{}".format(*bits) if isinstance(bits, list | tuple) else str(bits) if bits is not None else ""


def _expand_imports(
    quant_cfg: Any, imports: Mapping[str, str], path: Path
) -> Iterator[tuple[str, Settings | None, str]]:
    """Yields the name, the settings (None: disabled) and the parent class of each entry of a `quant_cfg`."""
    if isinstance(quant_cfg, dict):  # the earlier form
        quant_cfg = [
            {"quantizer_name": "*" if name == "default" else name, **(_split_enable(value))}
            for name, value in quant_cfg.items()
        ]
    for entry in quant_cfg:
        if "$import" in entry:
            unit, inner, file = _find_unit(imports, entry["$import"], path)
            yield from _expand_imports(unit if isinstance(unit, list) else [unit], inner, file)
            continue
        settings = entry.get("cfg")
        if isinstance(settings, dict) and "$import" in settings:
            settings = {**_find_unit(imports, settings["$import"], path)[0], **settings}
            del settings["$import"]
        if isinstance(settings, list):
            settings = {"num_bits": " then ".join(str(each.get("num_bits")) for each in settings)}
        is_enabled = entry.get("enable", True)
        yield (
            str(entry["quantizer_name"]),
            settings or {} if is_enabled else None,
            entry.get("parent_class") or "",
        )


def _split_enable(value: Settings) -> dict[str, Any]:
    settings = {key: each for key, each in value.items() if key != "enable"}
    return {"cfg": settings, "enable": value.get("enable", True)}


def _find_unit(imports: Mapping[str, str], name: str, path: Path) -> tuple[Any, Mapping[str, str], Path]:
    """Reads an imported part, from a folder above the file or from the installed `modelopt_recipes`."""
    relative = f"{imports.get(name, name)}.yaml"
    installed = importlib.util.find_spec("modelopt_recipes")
    folders = [
        *path.resolve().parents,
        *map(Path, (installed and installed.submodule_search_locations) or ()),
    ]
    file = next((folder / relative for folder in folders if (folder / relative).is_file()), None)
    if file is None:
        raise ImportFailed(
            f"'{path.name}' imports '{relative}': put it beside the file, or install nvidia-modelopt"
        )
    documents = _read_yaml(file.read_text(encoding="utf-8"), file, is_stream=True)
    header = documents[0] if isinstance(documents[0], dict) else {}
    return documents[-1], header.get("imports", {}), file


def _read_yaml(text: str, path: Path, *, is_stream: bool = False) -> Any:
    """The data of a YAML or JSON file; a list of documents if it is a stream. Raises ImportFailed."""
    yaml = importlib.import_module("yaml")
    try:
        return list(yaml.safe_load_all(text)) if is_stream else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ImportFailed(f"'{path.name}' is not YAML: {str(error).splitlines()[0]}") from None


TOOLS: Mapping[str, Callable[[str, Path], Iterable[ImportedRule]]] = {
    "qwix": _read_qwix,
    "megatron": _read_megatron,
    "te": _read_te,
    "modelopt": _read_modelopt,
}
