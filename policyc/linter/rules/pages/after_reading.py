"""Codes that are reported after a policy is read: by its suppression comments, and when a loss is compiled."""

from __future__ import annotations

from policyc.linter.rule import make_error, make_rule

RULES = (
    # ---- suppression comments
    make_rule(
        "unused-suppression",
        """A comment suppresses a finding that does not exist.

        The finding may have existed before. If the comment stays, it can hide a new finding with the same code.
        Remove the code from the comment; `--fix` does this.

        Errors found while a policy is read cannot be suppressed, so a suppression of such an error is always unused.
        """,
        bad="mlp.* -> fp8  # allow: shadowed-rule",
        good="mlp.* -> fp8",
    ),
    make_rule(
        "unknown-suppression",
        """A comment suppresses a code that does not exist.

        It has no effect. Correct the code or remove it. `policyc explain` lists all codes.
        """,
        bad="mlp.* -> fp8  # allow: shadowed-rul",
        good="mlp.* -> fp8",
    ),
    # ---- compiling a loss
    make_error(
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
    make_error(
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
    make_error(
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
