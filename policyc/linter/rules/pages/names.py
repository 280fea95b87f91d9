"""Codes of names, options and imports: text that can be parsed, but means nothing."""

from __future__ import annotations

from policyc.linter.rule import make_error

RULES = (
    make_error(
        "unknown-format",
        """A format does not exist.

        If it were ignored, the sites would run in a precision that nobody chose. The formats are `nvfp4`, `mxfp4`,
        `mxfp8`, `fp8`, `fp4`, `bf16`, `f32` and `keep`.
        """,
        bad="mlp.* -> nvfp5(sr=grad)",
        good="mlp.* -> fp8",
    ),
    make_error(
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
    make_error(
        "unknown-option",
        """A format does not have this option.

        If the option were ignored, an ablation would measure nothing. Each format has its own options: `sr` belongs
        to `nvfp4`, `mxfp4` and `fp4`, `grad` belongs to `fp8`. A named recipe takes no options where it is used: write
        them in its definition.
        """,
        bad="mlp.* -> fp8(sr=grad)",
        good="mlp.* -> fp8(grad=e4m3)",
    ),
    make_error(
        "unknown-value",
        """An option does not accept this value.

        `rht` and `sr` accept operands: a product (`wgrad`), a role (`grad`), one operand of a product (`wgrad.grad`),
        or several of these in braces. The message lists the values of the other options.
        """,
        bad="mlp.* -> fp8(grad=e3m4)",
        good="mlp.* -> fp8(grad=e4m3)",
    ),
    make_error(
        "duplicate-option",
        """An option is set twice in one recipe.

        Only one of the two values can hold. Remove the other. `--fix` removes the second one if both are equal.
        """,
        bad="mlp.* -> fp8(grad=e4m3, grad=e4m3)",
        good="mlp.* -> fp8(grad=e4m3)",
    ),
    make_error(
        "contradictory-options",
        """Two options of a recipe exclude each other.

        MS-EDEN rotates and rounds on its own, so `sr`, `rht`, `scale2d` and `scale=four_over_six` would have no
        effect with it. `scale=four_over_six` works only with rounding to nearest. A 16x16 tile cannot have one scale
        for each row. Remove one of the two options.
        """,
        bad="attention.wo @ bwd -> nvfp4(rounding=ms_eden, sr=grad)",
        good="attention.wo @ bwd -> nvfp4(rounding=ms_eden)",
    ),
    make_error(
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
    make_error(
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
    make_error(
        "duplicate-group",
        """A file defines a group of selectors twice, or a variant defines one of its policy again.

        Which of the two was meant? Rename one of them, or remove it. A group of an imported file may be defined again.
        A variant may define groups for its own rules. It cannot change a group of the policy, because the policy's
        rules stand for the selectors that the group had.
        """,
        bad="""
        group projections = {q,k,v}_proj
        group projections = o_proj
        projections -> fp8
        """,
        good="""
        group projections = {q,k,v,o}_proj
        projections -> fp8
        """,
    ),
    make_error(
        "group-in-selector",
        """The name of a group is a part of a longer selector.

        A group stands for whole selectors, so it stands alone in the list of selectors of a rule. Only `@` may follow
        it. If the selector is about a scope of that name, give the group another name.
        """,
        bad="""
        group projections = {q,k,v,o}_proj
        decoder.projections -> fp8
        """,
        good="""
        group projections = decoder.*.{q,k,v,o}_proj
        projections -> fp8
        """,
    ),
    make_error(
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
    make_error(
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
    make_error(
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
    # ---- imports
    make_error(
        "bad-import-path",
        """An import is not a relative path to a policy file.

        An import reads only files that end in `.policy`. The path is relative to the importing file and uses `/`
        between directories. The ending may be omitted. A symbolic link must not lead out of the directory. These limits
        make it safe to lint a policy from an unknown source: it cannot read other files.
        """,
        bad='import "/etc/passwd"',
        good='import "fp8.policy"',
    ),
    make_error(
        "import-not-found",
        """An imported policy does not exist.

        Imports are looked up in the directory of the importing file first, then among the bundled policies. Check the
        name, or put the file beside the importing one.
        """,
        bad='import "my_fp8.policy"',
        good='import "fp8.policy"',
    ),
    make_error(
        "import-cycle",
        """A policy imports itself, directly or through other files.

        Later rules override earlier ones, and a cycle has no order. Move what both files need into a third file, and
        import that.

        The bad example is the content of a file named `a.policy`.
        """,
        bad='import "a.policy"',
        good='import "fp8.policy"',
    ),
    make_error(
        "too-many-imports",
        """A policy imports more than 256 files in total.

        A file counts each time it is imported. Without this limit, a few files that import each other many times
        could use up all memory. Import each file once.

        The bad example stands for a file with 257 such lines.
        """,
        bad='import "fp8.policy"',
        good='import "fp8.policy"',
    ),
)
