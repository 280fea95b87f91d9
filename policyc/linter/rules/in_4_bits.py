"""Rules against few bits at the sites that they harm most: attention scores, embedding, head, router, last blocks.

Without a program, they look up which rule of the policy decides a site with one of the names that models commonly give
to each kind. With a program, they look at the kinds of its sites.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.language.kinds import Flags, flags_of
from policyc.language.policy import Policy, Rule
from policyc.language.predicates import Flag
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, PathSegment, Selector, expand_selector, parse_path
from policyc.linter.context import AppliedRecipe, Context

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan
    from policyc.compiler.sites.site import Site

# Names that models commonly give to the sites that low precision harms most. Without a program, a rule has only names.
# Names that harmless layers also have, such as `gate` or `output` inside attention, are left out; with a program, these
# rules find such sites by their kind.
_NAMES = {
    "scores": (
        "attention.scores", "attn.scores", "self_attn.scores", "self_attention.scores", "attention.qk", "attention.pv",
        "attention_op", "dot_product_attention", "scores", "qk", "attention",
    ),
    "embedding": (
        "embed_tokens", "embed", "embedding", "embeddings", "embedder", "token_embedder", "token_embedding",
        "tok_embeddings", "wte", "word_embeddings",
    ),
    "head": (
        "lm_head", "head", "output", "output_head", "output_layer", "logits", "logits_dense", "unembed", "unembedding",
        "embed_out", "to_logits",
    ),
    "router": ("router", "moe.router", "moe.gate", "block_sparse_moe.gate", "MoeBlock.gate"),
}  # fmt: skip
_SENSITIVE_NAMES = frozenset(name for names in _NAMES.values() for name in names) - {"attention"}
"""All of these names. `attention` alone is left out: it also names the block with the projections."""

_MIDDLE_BLOCK = (16, 32)
_BLOCKS = {"scores": _MIDDLE_BLOCK, "router": _MIDDLE_BLOCK}
"""For the kinds that are in blocks: the index of an example block, and the number of blocks."""


def attention_scores_in_4_bits(context: Context) -> Iterable[Diagnostic]:
    """Warning: The scores of attention are in 4 bits.

    `softmax(q k) v` contains two sites without a parameter. A rule for all of attention, or for all sites, matches
    them together with the projections. Their error passes through an exponential. Add `where weight` to the rule to
    match the projections only.

    Bad:  attention.* -> nvfp4(sr=grad)
          layers[-4:] -> bf16
    Good: attention.* where weight -> nvfp4(sr=grad)
          layers[-4:] -> bf16
    Without a program: this check relies on kinds in `where` and on common names.
    """
    return _check("scores", context)


def quantized_embedding(context: Context) -> Iterable[Diagnostic]:
    """Warning: A rule quantizes the embedding.

    Some models look up tokens by a GEMM with one-hot rows. A rule for all sites matches this GEMM too. The GEMM takes
    almost no time, and every token passes through it. Add a rule that keeps the embedding in high precision. It is
    recognized by its one-hot operand or by its name.

    Bad:  embed_tokens -> nvfp4(sr=grad)
          layers[-4:] -> bf16
    Good: embed_tokens -> bf16
    Without a program: this check is for 4 bits only, and relies on kinds in `where` and on common names.
    """
    return _check("embedding", context, max_bits=8)


def quantized_head(context: Context) -> Iterable[Diagnostic]:
    """Warning: A rule quantizes the output head.

    The head computes the logits, and its errors go directly into the loss. It is a few percent of the FLOPs. All
    published recipes keep it in high precision. Add a rule that does the same. It is recognized by its name, by a
    weight that it shares with the embedding, or as the last and widest GEMM of the loss.

    Bad:  lm_head -> nvfp4(sr=grad)
          layers[-4:] -> bf16
    Good: lm_head -> bf16
    Without a program: this check is for 4 bits only, and relies on kinds in `where` and on common names.
    """
    return _check("head", context, max_bits=8)


def router_in_4_bits(context: Context) -> Iterable[Diagnostic]:
    """Warning: The router of a mixture of experts is in 4 bits.

    A router is small, so 4 bits save almost no time, and an error in it sends tokens to other experts. Add a rule
    that keeps the router in high precision.

    Bad:  moe.* -> nvfp4(sr=grad)
          layers[-4:] -> bf16
    Good: moe.* -> nvfp4(sr=grad)
          * where router -> bf16
          * where layer >= -4 -> bf16
    Without a program: this check relies on kinds in `where` and on common names.
    """
    return _check("router", context)


def _check(kind: str, context: Context, max_bits: int = 4) -> Iterator[Diagnostic]:
    """Looks for rules that quantize sites of a kind. Scores are sites without a weight."""
    if context.plan is not None:
        yield from _check_program(kind, context, context.plan, max_bits)
        return
    noun = "scores of attention" if kind == "scores" else kind
    for rule, name in _find_rules_in_4_bits(kind, context):
        message = f"this rule puts the {noun} ('{name}') in 4 bits"
        yield Diagnostic(span=rule.span, message=message, help=_suggest(kind, rule))


def _check_program(kind: str, context: Context, plan: Plan, max_bits: int) -> Iterator[Diagnostic]:
    """Checks the sites of the program instead of common names."""
    from policyc.compiler.planning.plan_checks import suggest_recipe  # loads JAX
    from policyc.linter import products

    def is_sensitive(site: Site) -> bool:
        return site.weight is None if kind == "scores" else site.kind.name == kind

    for index, sites in products.find_quantizing_rules(context, is_sensitive, max_bits):
        noun, help = "sites without a parameter", _suggest_weight(plan.policy.rules[index])
        if kind != "scores":
            noun, help = kind, suggest_recipe(plan, index, sites, "bf16", f"* where {kind} -> bf16")
        message = f"this rule quantizes the {noun} ('{sites[0].name}')"
        yield products.report_rule(plan, index, sites, message, help)


def _example_path(pattern: Selector) -> DottedPath:
    """Returns a short path that the pattern matches if its indices are in the slices."""
    named = [segment for segment in pattern.segments if not segment.is_wildcard]
    return tuple(
        PathSegment(s.glob.replace("*", "").replace("?", "x") or "x", None if s.indices is None else 0)
        for s in named
    ) or (PathSegment("x"),)


def _suggest(kind: str, rule: Rule) -> str:
    patterns = [pattern for selector in rule.selectors for pattern in expand_selector(selector)]
    is_named = all(".".join(map(str, _example_path(pattern))) in _NAMES[kind] for pattern in patterns)
    if rule.where == Flag(name=kind) or (is_named and kind != "scores"):
        return "write '-> bf16' in this rule"  # the rule matches nothing else
    return _suggest_weight(rule) if kind == "scores" else f"add a rule after it: * where {kind} -> bf16"


def _suggest_weight(rule: Rule) -> str:
    condition = "where weight" if rule.where is None else "and weight"
    return f"add '{condition}' to match only the projections"


def _find_rules_in_4_bits(kind: str, context: Context) -> Iterator[tuple[Rule, str]]:
    """Yields each rule that puts a site of a kind in 4 bits, with the first name for which it does."""
    rules = context.resolved_rules
    if not any(rule.recipe.bits(gemm) == 4 for rule in rules for gemm in Gemm):
        return
    flags = flags_of(kind, *(() if kind == "scores" else ("weight",)))
    name_by_rule: dict[int, str] = {}
    for name in _NAMES[kind]:
        for gemm in Gemm:
            rule = context.find_deciding_rule(parse_path(name), gemm, flags, _BLOCKS.get(kind))
            if rule is not None and rule.recipe.bits(gemm) == 4:
                name_by_rule.setdefault(rule.index, name)
    for index, name in sorted(name_by_rule.items()):
        yield rules[index].rule, name


_CONDITION = "where (mlp or attention) and layer < -4"
_PUBLISHED = {"nvfp4": "nvfp4(rht=wgrad, sr=grad, scale2d=weights)", "mxfp4": "mxfp4(rht=wgrad, sr=grad)"}


def everything_in_4_bits(context: Context) -> Iterable[Diagnostic]:
    """Warning: The last rule puts every product in 4 bits.

    No published recipe does this. Attention scores, the embedding, the head, routers and the last blocks stay in high
    precision, and gradients are rounded stochastically. Restrict the rule to the projections and MLPs of all blocks
    but the last four, and use the options of a published recipe. The unsafe fix does both, but it does not change a
    recipe that already has options.

    Bad:  * -> nvfp4
    Good: * where (mlp or attention) and layer < -4 -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
    Instead of: attention-scores-in-4-bits, quantized-embedding, quantized-head, nearest-rounded-gradient,
          no-high-precision-tail, router-in-4-bits
    Without a program: this is one finding. With one, or if other rules follow, each kind that is still in 4 bits has
          a finding of its own.
    """
    applied = [a for a in context.applied_recipes if a.rule in context.policy.rules[-1:]]
    if not applied or context.plan is not None:
        return
    rule, recipe = applied[0].rule, applied[0].recipe  # the first is that of the policy without a variant
    if rule.head != "*" or rule.when or any(recipe.bits(gemm) != 4 for gemm in Gemm):
        return
    yield Diagnostic(
        span=rule.span,
        message="this rule puts everything in 4 bits, including embedding, head, routers, scores and last blocks",
        help=f"add '{_CONDITION}' to match only the MLPs and projections of the other blocks",
        fix=_write_fix(context, applied[0]),
    )


def _write_fix(context: Context, applied: AppliedRecipe) -> Fix | None:
    """Returns a fix that restricts the rule, and gives the published options to a format without options.

    None if the rule has an `expect`, whose number would have to change too.
    """
    rule, call = applied.rule, applied.find_recipe_call(Gemm.FPROP)
    if rule.expect is not None:
        return None  # fewer sites will match, and the new number is not known
    end = rule.selectors[-1].span.end
    edits, written = [Edit(Span(rule.span.source, end, end), f" {_CONDITION}")], str(rule.recipe)
    if call.name in _PUBLISHED and not call.settings and context.in_this_file(call.span):
        written = _PUBLISHED[call.name]
        edits.append(Edit(call.span, written))
    return Fix(message=f"write * {_CONDITION} -> {written}", edits=tuple(edits), safe=False)


# ---- the last blocks

_DEPTH = 32  # of the example stack; the answer does not depend on it
_MAX_STACKS = 8
_MAX_RULES = 50  # to check: each is compared with all others, and one of them is enough
_KINDS = tuple(map(flags_of, ("mlp", "experts", "attention")))  # of the sites that make up a block
_BLOCKS_PER_KEPT_BLOCK = 8  # as in the published runs: 4 of 32 and 8 of 62


def no_high_precision_tail(context: Context) -> Iterable[Diagnostic]:
    """Warning: The last blocks run in 4 bits like all others.

    The last blocks are the most sensitive to 4 bits. Published runs keep the last 4 of 32 blocks (Llama 3 8B) or the
    last 8 of 62 (12B) in BF16. Add a rule for them after the others. `layer` counts the blocks of any stack, scanned
    or not, and whatever its name.

    Bad:  mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
    Good: mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
          * where layer >= -4 -> bf16
    Without a program: this check looks at the stacks that the policy slices, or at `layers`. A rule for all names is
          checked for each kind of site that it can match.
    """
    return _check_tail_by_name(context) if context.plan is None else _check_tail_of_program(context.plan)


def _check_tail_by_name(context: Context) -> Iterator[Diagnostic]:
    """Checks stacks by the names in the policy, which are all that is known without a program."""
    last_layers = [PathSegment(name, _DEPTH - 1, _DEPTH) for name in _find_stack_names(context.policy)]
    in_4_bits = (r for r in context.resolved_rules if r.recipe.bits(Gemm.FPROP) == 4)
    for rule in itertools.islice((r for r in in_4_bits if context.in_this_file(r.rule.span)), _MAX_RULES):
        for pattern in rule.patterns:
            # Sensitive modules have codes of their own.
            is_sensitive = ".".join(map(str, _example_path(pattern))) in _SENSITIVE_NAMES
            if Gemm.FPROP not in pattern.products or is_sensitive:
                continue
            paths = [_locate_in_layer(pattern, layer) for layer in last_layers]
            are_in_4_bits = [
                all(_is_in_4_bits(context, path, flags) for path in paths)
                for flags in _KINDS
                if _matches_tail(rule.rule, flags)
            ]
            # A name stands for one kind, but which one is not known.
            is_any_kind = all(segment.is_wildcard for segment in pattern.segments)
            if are_in_4_bits and (any if is_any_kind else all)(are_in_4_bits):
                yield Diagnostic(
                    span=rule.rule.span,
                    message="the last blocks run in 4 bits too",
                    help="add a rule after it: * where layer >= -4 -> bf16",
                )
                return


def _find_stack_names(policy: Policy) -> tuple[str, ...]:
    """Returns the names of the stacks that the policy slices, or the most common name if it slices none."""
    selectors = (selector for rule in policy.rules for selector in rule.selectors)
    segments = (segment for s in selectors for pattern in expand_selector(s) for segment in pattern.segments)
    names = dict.fromkeys(
        p.glob.replace("*", "").replace("?", "x") for p in segments if p.indices is not None
    )
    return tuple(name for name in names if name)[:_MAX_STACKS] or ("layers",)


def _locate_in_layer(pattern: Selector, layer: PathSegment) -> DottedPath:
    """Returns a path that the pattern matches, in the given layer of a stack."""
    path = _example_path(pattern)
    if any(p.indices is not None for p in pattern.segments):
        return tuple(PathSegment(n.text, layer.index, layer.size) if n.index is not None else n for n in path)
    if any(n.text == layer.text for n in path):
        return tuple(layer if n.text == layer.text else n for n in path)
    return path if pattern.anchored else (layer, *path)


def _matches_tail(rule: Rule, flags: Flags) -> bool:
    """Returns False if the condition of a rule excludes a site of a kind in the last block, whatever its size."""
    layer = {"block": True, "layer": _DEPTH - 1, "layers": _DEPTH}
    return rule.where is None or rule.where.holds({**flags, **layer}) is not False


def _is_in_4_bits(context: Context, path: DottedPath, flags: Flags) -> bool:
    rule = context.find_deciding_rule(path, Gemm.FPROP, flags, (_DEPTH - 1, _DEPTH))
    return rule is not None and rule.recipe.bits(Gemm.FPROP) == 4


def _check_tail_of_program(plan: Plan) -> Iterator[Diagnostic]:
    """Yields each rule that puts the last of several blocks of the program in 4 bits at the start of training."""
    from policyc.linter.products import report_rule  # loads JAX

    sites_by_rule: dict[int, dict[Site, int]] = {}
    decisions = plan.decisions(plan.phases[0])
    for site in (s for s in plan.sites if not s.opaque):
        for layer in site.layers():
            decision, attributes = decisions[site.address, layer], site.attributes(layer)
            rule, number, count = (
                decision.rule(Gemm.FPROP),
                attributes.get("layer"),
                attributes.get("layers"),
            )
            is_in_4_bits = decision.recipe is not None and decision.recipe.bits(Gemm.FPROP) == 4
            if count is not None and number == count - 1 > 0 and rule is not None and is_in_4_bits:
                sites_by_rule.setdefault(rule, {})[site] = count
    for index, counts in sorted(sites_by_rule.items()):
        kept = max(1, max(counts.values()) // _BLOCKS_PER_KEPT_BLOCK)
        message = f"the last blocks run in 4 bits too ('{next(iter(counts)).name}')"
        help = f"add a rule after it: * where layer >= -{kept} -> bf16"
        yield report_rule(plan, index, counts, message, help)
