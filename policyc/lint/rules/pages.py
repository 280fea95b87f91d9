"""Codes that no check of the linter reports, each with its page.

They are reported while a policy is read, by the suppression comments, or when a loss is compiled. To add a code, add
a row here and report it where the fault is detected.
"""

from __future__ import annotations

from policyc.language.diagnostics import Severity
from policyc.lint.rule import LintRule, format_page


def _row(
    code: str,
    text: str,
    *,
    bad: str,
    good: str,
    severity: Severity = Severity.ERROR,
    needs_program: bool = False,
) -> LintRule:
    doc = format_page(text, bad=bad, good=good)
    return LintRule(code=code, doc=doc, severity=severity, needs_program=needs_program)


RULES = (
    # ---- reading: the text
    _row(
        "unreadable-file",
        """The file cannot be read.

        A policy is a file of UTF-8 text of at most 16 MiB. This error is reported for a directory, for a file without
        read permission, for a path that does not exist and for bytes that are not UTF-8. `policyc lint` then exits
        with 2 instead of 1, because it could not check the policy at all.

        Check the path and the encoding of the file. A bundled policy needs no path: `policyc lint llama_nvfp4`.

        The examples show what a readable file contains. The fault is in the file, not in its text.
        """,
        bad="mlp.* -> bf16",
        good="mlp.* -> bf16",
    ),
    _row(
        "syntax-error",
        """The text is not a statement of the policy language.

        A statement is a rule (`selectors -> recipe`), a `recipe`, a `seed`, an `import`, a schedule (`after`, `until`)
        or a `variant`. Statements are separated by line ends or semicolons. A statement continues on the next line
        inside parentheses and after a comma, an arrow or an operator. Each statement is parsed separately, so the
        errors reported below this one are real.

        If a scope has the name of a keyword and stands at the start of a line, write `*.` before it: `*.recipe`.
        """,
        bad="mlp.* => bf16",
        good="mlp.* -> bf16",
    ),
    _row(
        "confusable-letter",
        """A letter looks like an ASCII letter but is another one.

        A Cyrillic or full-width letter in a name often comes from copied text. Such a name matches nothing that it
        seems to match. Type the name again. Names in other scripts are valid: the error is reported for a word that
        mixes such letters with ASCII letters, or that has only letters that look like ASCII letters.
        """,
        bad="ml\u0440.* -> fp8",
        good="mlp.* -> fp8",
    ),
    _row(
        "nested-too-deep",
        """Brackets, splits or recipe names are nested too deeply.

        The limit is 32 levels, and 4 levels for a `split` inside a `split`. Hand-written policies do not need this
        depth. If a program writes the policy, let it name the last recipe directly, or write several rules.
        """,
        bad="mlp where (((((((((((((((((((((((((((((((((weight))))))))))))))))))))))))))))))))) -> bf16",
        good="mlp where weight -> bf16",
    ),
    _row(
        "number-out-of-range",
        """A number is out of range, or is not an integer where an integer is required.

        Steps, indices, sizes and counts are integers of at most 18 digits. Percentages go up to 100 and may have
        decimals.
        """,
        bad="after 110% { mlp.* -> bf16 }",
        good="after 82.5% { mlp.* -> bf16 }",
    ),
    _row(
        "misplaced-statement",
        """A statement is not allowed in this block.

        A schedule block (`after`, `until`) may contain only rules and other schedule blocks. A variant may contain
        everything except variants. To change a recipe during training, define two recipes and write a rule for each.
        """,
        bad="after 50% { recipe nv = bf16 }",
        good="""
        recipe late = bf16
        after 50% { mlp.* -> late }
        """,
    ),
    _row(
        "bad-slice",
        """An index or a slice is not valid.

        `layers[3]` is one layer. `layers[-4:]`, `layers[:2]` and `layers[::2]` are slices as in Python, with a step
        of at least 1. A percentage of the depth is allowed in a slice only: `layers[-15%:]`.
        """,
        bad="layers[50%].mlp -> bf16",
        good="layers[50%:].mlp -> bf16",
    ),
    _row(
        "bad-predicate",
        """A condition is neither true nor false.

        `m`, `n`, `k`, `batch` and `flops` are numbers: compare them with something. `weight` is true or false: use it
        without a comparison.
        """,
        bad="* where k % 16 -> bf16",
        good="* where k % 16 != 0 -> bf16",
    ),
    _row(
        "unknown-variable",
        """A condition uses an attribute that sites do not have.

        The condition cannot be evaluated. Use `m`, `n`, `k`, `batch`, `flops` or `weight`.
        """,
        bad="* where size > 1024 -> bf16",
        good="* where flops > 1024 -> bf16",
    ),
    _row(
        "unknown-product",
        """The name after `@` is not a product.

        The products of a linear layer are `fprop`, `dgrad` and `wgrad`. `bwd` means `dgrad` and `wgrad`.
        """,
        bad="mlp.* @ forward -> bf16",
        good="mlp.* @ fprop -> bf16",
    ),
    _row(
        "too-many-alternatives",
        """The braces of one selector expand to more than 1024 selectors.

        The number of alternatives is the product over all pairs of braces. Use `*` or `?` for the parts that need no
        list of names.
        """,
        bad="{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d} -> bf16",
        good="?.?.?.?.?.{a,b,c,d} -> bf16",
    ),
    # ---- reading: names and options
    _row(
        "unknown-format",
        """A format does not exist.

        If it were ignored, the sites would run in a precision that nobody chose. The formats are `nvfp4`, `mxfp4`,
        `mxfp8`, `fp8`, `fp4`, `bf16`, `f32` and `keep`.
        """,
        bad="mlp.* -> nvfp5(sr=grad)",
        good="mlp.* -> fp8",
    ),
    _row(
        "unknown-recipe",
        """A rule or a recipe uses a recipe that is not defined.

        The definition may come after the use, or from an import. Define the recipe, or correct its name.
        """,
        bad="mlp.* -> my_recipe",
        good="""
        recipe my_recipe = fp8
        mlp.* -> my_recipe
        """,
    ),
    _row(
        "unknown-option",
        """A format does not have this option.

        If the option were ignored, an ablation would measure nothing. Each format has its own options: `sr` belongs
        to `nvfp4`, `mxfp4` and `fp4`, `grad` belongs to `fp8`. A named recipe takes no options where it is used: write
        them in its definition.
        """,
        bad="mlp.* -> fp8(sr=grad)",
        good="mlp.* -> fp8(grad=e4m3)",
    ),
    _row(
        "unknown-value",
        """An option does not accept this value.

        `rht` and `sr` accept operands: a product (`wgrad`), a role (`grad`), one operand of a product (`wgrad.grad`),
        or several of these in braces. The message lists the values of the other options.
        """,
        bad="mlp.* -> fp8(grad=e3m4)",
        good="mlp.* -> fp8(grad=e4m3)",
    ),
    _row(
        "duplicate-option",
        """An option is set twice in one recipe.

        Only one of the two values can hold. Remove the other. `--fix` removes the second one if both are equal.
        """,
        bad="mlp.* -> fp8(grad=e4m3, grad=e4m3)",
        good="mlp.* -> fp8(grad=e4m3)",
    ),
    _row(
        "contradictory-options",
        """Two options of a recipe exclude each other.

        MS-EDEN rotates and rounds on its own, so `sr`, `rht`, `scale2d` and `scale=four_over_six` would have no
        effect with it. `scale=four_over_six` works only with rounding to nearest. A 16x16 tile cannot have one scale
        for each row. Remove one of the two options.
        """,
        bad="attention.wo @ bwd -> nvfp4(rounding=ms_eden, sr=grad)",
        good="attention.wo @ bwd -> nvfp4(rounding=ms_eden)",
    ),
    _row(
        "duplicate-recipe",
        """A file defines a recipe twice.

        The first definition would be lost. Rename or remove one of them.

        To change an imported recipe, define it again after the import. This also changes the imported rules that use
        it. An import after the definition is an error, because it would undo the definition.
        """,
        bad="""
        recipe a = fp8
        recipe a = bf16
        mlp.* -> a
        """,
        good="""
        recipe a = fp8
        mlp.* -> a
        """,
    ),
    _row(
        "duplicate-variant",
        """A file defines a variant twice.

        A sweep selects variants by name, so it cannot run two variants with the same name. Rename one of them.
        """,
        bad="""
        mlp.* -> fp8
        variant a { mlp.* -> bf16 }
        variant a { mlp.* -> f32 }
        """,
        good="""
        mlp.* -> fp8
        variant a { mlp.* -> bf16 }
        variant b { mlp.* -> f32 }
        """,
    ),
    _row(
        "duplicate-seed",
        """A file sets the seed twice.

        The first seed would be lost. Remove one of them. To change an imported seed, set it again after the import.
        """,
        bad="""
        seed = 1
        seed = 2
        mlp.* -> nvfp4(sr=grad)
        layers[-4:].mlp.* -> bf16
        """,
        good="""
        seed = 2
        mlp.* -> nvfp4(sr=grad)
        layers[-4:].mlp.* -> bf16
        """,
    ),
    _row(
        "reserved-name",
        """A recipe has the name of a format.

        With `recipe bf16 = fp8`, a rule that says `bf16` would run in fp8. Choose another name.
        """,
        bad="""
        recipe bf16 = fp8
        mlp.* -> bf16
        """,
        good="""
        recipe low = fp8
        mlp.* -> low
        """,
    ),
    _row(
        "recipe-cycle",
        """A recipe refers to itself, directly or through other recipes.

        A chain of recipe names must end in a format or a `split`. Define one recipe of the cycle by a format.
        """,
        bad="""
        recipe a = b
        recipe b = a
        mlp.* -> a
        """,
        good="""
        recipe a = b
        recipe b = fp8
        mlp.* -> a
        """,
    ),
    # ---- reading: imports
    _row(
        "bad-import-path",
        """An import is not a relative path to a policy file.

        An import reads only files that end in `.policy`. The path is relative to the importing file and uses `/`
        between directories. The ending may be omitted. A symbolic link must not lead out of the directory. These limits
        make it safe to lint a policy from an unknown source: it cannot read other files.
        """,
        bad='import "/etc/passwd"',
        good='import "fp8.policy"',
    ),
    _row(
        "import-not-found",
        """An imported policy does not exist.

        Imports are looked up in the directory of the importing file first, then among the bundled policies. Check the
        name, or put the file beside the importing one.
        """,
        bad='import "my_fp8.policy"',
        good='import "fp8.policy"',
    ),
    _row(
        "import-cycle",
        """A policy imports itself, directly or through other files.

        Later rules override earlier ones, and a cycle has no order. Move what both files need into a third file, and
        import that.

        The bad example is the content of a file named `a.policy`.
        """,
        bad='import "a.policy"',
        good='import "fp8.policy"',
    ),
    _row(
        "too-many-imports",
        """A policy imports more than 256 files in total.

        A file counts each time it is imported. Without this limit, a few files that import each other many times
        could use up all memory. Import each file once.

        The bad example stands for a file with 257 such lines.
        """,
        bad='import "fp8.policy"',
        good='import "fp8.policy"',
    ),
    # ---- suppression comments
    _row(
        "unused-suppression",
        """A comment suppresses a finding that does not exist.

        The finding may have existed before. If the comment stays, it can hide a new finding with the same code.
        Remove the code from the comment; `--fix` does this.

        Errors found while a policy is read cannot be suppressed, so a suppression of such an error is always unused.
        """,
        bad="mlp.* -> fp8  # allow: shadowed-rule",
        good="mlp.* -> fp8",
        severity=Severity.WARNING,
    ),
    _row(
        "unknown-suppression",
        """A comment suppresses a code that does not exist.

        It has no effect. Correct the code or remove it. `policyc explain` lists all codes.
        """,
        bad="mlp.* -> fp8  # allow: shadowed-rul",
        good="mlp.* -> fp8",
        severity=Severity.WARNING,
    ),
    # ---- compiling a loss
    _row(
        "schedule-without-step",
        """A policy has a schedule, but the program does not report its training step.

        `after` and `until` depend on the step. Call `policyc.set_step(n, total=N)` before each step of the training
        loop, or use a policy without a schedule. This error is reported when a loss is compiled.
        """,
        bad="""
        mlp.* -> fp8
        after 90% { mlp.* -> bf16 }
        """,
        good="mlp.* -> fp8",
        needs_program=True,
    ),
    _row(
        "not-native",
        """A product would be emulated, but `--require-native` is set.

        With `--require-native`, the GPU must multiply every quantized GEMM natively in its format. The message names
        the obstacle: the GPU, the format or a shape. Use a format that the GPU supports, or remove the flag. This
        error is reported when a loss is compiled.
        """,
        bad="mlp.* -> mxfp4  # no backend has native GEMMs for it",
        good="mlp.* -> nvfp4",
        needs_program=True,
    ),
    _row(
        "missing-library",
        """The library of the selected backend is not installed.

        `--backend te` runs products with Transformer Engine, which policyc does not install. The message contains the
        installation command. `--backend auto` needs no extra library. This error is reported when a loss is compiled
        for the local devices. A plan for another target needs no library.
        """,
        bad="mlp.* -> nvfp4  # policyc apply --backend te, on a Blackwell GPU without Transformer Engine",
        good="mlp.* -> nvfp4  # policyc apply --backend auto: the same numbers with XLA's own GEMMs",
        needs_program=True,
    ),
)
