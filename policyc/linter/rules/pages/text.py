"""Lexer and parser errors."""

from __future__ import annotations

from policyc.linter.rule import make_error

RULES = (
    make_error(
        "unreadable-file",
        """The file cannot be read.

        A policy is a file of UTF-8 text of at most 16 MiB. This error is reported for a directory, for a file without
        read permission, for a path or a variant (`POLICY:VARIANT`) that does not exist and for bytes that are not
        UTF-8. `policyc lint` then exits with 2 instead of 1, because it could not check the policy at all.

        Check the path and the encoding of the file. A bundled policy needs no path: `policyc lint llama_nvfp4`.

        The examples show what a readable file contains. The fault is in the file, not in its text.
        """,
        bad="mlp.* -> bf16",
        good="mlp.* -> bf16",
    ),
    make_error(
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
    make_error(
        "confusable-letter",
        """A letter looks like an ASCII letter but is another one.

        A Cyrillic or full-width letter in a name often comes from copied text. Such a name matches nothing that it
        seems to match. Type the name again. Names in other scripts are valid: the error is reported for a word that
        mixes such letters with ASCII letters, or that has only letters that look like ASCII letters.
        """,
        bad="ml\u0440.* -> fp8",
        good="mlp.* -> fp8",
    ),
    make_error(
        "nested-too-deep",
        """Brackets, splits or recipe names are nested too deeply.

        The limit is 32 levels, and 4 levels for a `split` inside a `split`. Hand-written policies do not need this
        depth. If a program writes the policy, let it name the last recipe directly, or write several rules.
        """,
        bad="mlp where (((((((((((((((((((((((((((((((((weight))))))))))))))))))))))))))))))))) -> bf16",
        good="mlp where weight -> bf16",
    ),
    make_error(
        "number-out-of-range",
        """A number is out of range, or is not an integer where an integer is required.

        Steps, indices, sizes and counts are integers of at most 18 digits. Percentages go up to 100 and may have
        decimals.
        """,
        bad="after 110% { mlp.* -> bf16 }",
        good="after 82.5% { mlp.* -> bf16 }",
    ),
    make_error(
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
    make_error(
        "bad-slice",
        """An index or a slice is not valid.

        `layers[3]` is one layer. `layers[-4:]`, `layers[:2]` and `layers[::2]` are slices as in Python, with a step
        of at least 1. A percentage of the depth is allowed in a slice only: `layers[-15%:]`.
        """,
        bad="layers[50%].mlp -> bf16",
        good="layers[50%:].mlp -> bf16",
    ),
    make_error(
        "bad-predicate",
        """A condition is neither true nor false.

        `m`, `n`, `k`, `batch` and `flops` are numbers: compare them with something. `weight` is true or false: use it
        without a comparison.
        """,
        bad="* where k % 16 -> bf16",
        good="* where k % 16 != 0 -> bf16",
    ),
    make_error(
        "unknown-variable",
        """A condition uses an attribute that sites do not have.

        The condition cannot be evaluated. Use a size (`m`, `n`, `k`, `batch`, `flops`), `weight`, a kind such as `mlp`,
        or `layer`.
        """,
        bad="* where size > 1024 -> bf16",
        good="* where flops > 1024 -> bf16",
    ),
    make_error(
        "unknown-product",
        """The name after `@` is not a product.

        The products of a linear layer are `fprop`, `dgrad` and `wgrad`. `bwd` means `dgrad` and `wgrad`.
        """,
        bad="mlp.* @ forward -> bf16",
        good="mlp.* @ fprop -> bf16",
    ),
    make_error(
        "too-many-alternatives",
        """The braces of one selector expand to more than 1024 selectors.

        The number of alternatives is the product over all pairs of braces. Use `*` or `?` for the parts that need no
        list of names.
        """,
        bad="{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d} -> bf16",
        good="?.?.?.?.?.{a,b,c,d} -> bf16",
    ),
)
