"""Codes of the checks of a program, which are in the package `program`: pages need no JAX."""

from __future__ import annotations

from policyc.language.diagnostics import Severity
from policyc.linter.rule import make_error, make_rule

RULES = (
    make_error(
        "expect-violated",
        """A rule matches a different number of sites than it expects.

        `expect N` states how many GEMMs a rule matches, counting every layer of a stack. The numbers differ if the
        model has grown a layer, or if a name matches more than intended. `policyc apply` refuses to run such a policy.
        Correct the selector or the number. Checked with a program and when a loss is compiled.
        """,
        bad="mlp.* -> fp8 expect 97",
        good="mlp.* -> fp8 expect 96",
        needs_program=True,
    ),
    make_rule(
        "hadamard-does-not-fit",
        """The contracted size is not a multiple of the Hadamard transform's length.

        The transform runs over whole groups along the contracted size, which is m in wgrad. If that size is not a
        multiple of the length, zeros are added. Transformer Engine does not accept such shapes at all: it needs rows
        in multiples of 64 and columns in multiples of 128. Use a shorter transform, or keep such sites.

        A transform that is no longer than a block of the format is not reported: `padded-gemm` reports the same sizes.
        Checked only with a program.
        """,
        bad="* -> nvfp4(rht=wgrad, rht_size=128, sr=grad)",
        good="* -> nvfp4(rht=wgrad, sr=grad)",
        needs_program=True,
    ),
    make_rule(
        "lowered-fp32-product",
        """A rule for many sites also lowers a product that the program computes in fp32 on purpose.

        A program that computes in bfloat16 often has a few products in fp32: a router, the logits, the sum over
        log-softmax. A program in fp32 may ask for more precision in a few products (`precision=HIGHEST`). A rule means
        what it says: `* -> bf16` takes these products too, and casts their operands. If that is not meant, add a rule
        that keeps them, or write `* where weight` if they are products of two activations.

        A product counts as fp32 on purpose if both operands are fp32 and more than half of the program's GEMMs have
        16-bit operands, or if it asks for the highest precision and more than half of them do not. A rule that takes
        no other products is not reported. Checked only with a program.
        """,
        bad="* -> bf16",
        good="""
        * -> bf16
        router -> keep
        """,
        severity=Severity.NOTE,
        needs_program=True,
    ),
    make_error(
        "opaque-index",
        """A rule chooses layers by index where the index of a layer is not known.

        The compiler follows an index from each GEMM back to the parameter as the program stores it: through slices,
        reshapes, transposes, concatenations, gathers by constants, scans and loop counters. It cannot follow an index
        that depends on values (`w[tokens]`, a `while` loop), and it cannot tell the members of a stack apart that one
        product reads at once (`vmap`). In a stack in a stack, such as `stages.layers.up` with two axes of layers, one
        index can be read in two ways: `layers[1]` is one of all layers, or the second of each stage. `policyc apply`
        refuses to run instead of guessing the layer. Choose the whole stack, or scan over it, or give both indices:
        `stages[0].layers[1]`. Checked with a program and when a loss is compiled.
        """,
        bad="stages[-1].mlp.* -> bf16",
        good="stages.mlp.* -> bf16",
        needs_program=True,
    ),
    make_error(
        "opaque-site",
        """A rule changes a GEMM that the compiler cannot rewrite.

        The compiler does not enter a function with its own backward rule (`jax.custom_vjp`), a Pallas kernel, or a
        container that it does not know: what the function computes is not what its gradient runs. `policyc apply`
        refuses to run instead of skipping such a GEMM silently. Add a rule that keeps it. Checked with a program and
        when a loss is compiled.
        """,
        bad="* -> fp8",
        good="""
        * -> fp8
        cross_entropy -> keep
        """,
        needs_program=True,
    ),
    make_rule(
        "overridden-rule",
        """Later rules override a rule on all of its sites in this model.

        For another model the rule could have an effect (otherwise it is a `shadowed-rule`), but in this one it decides
        nothing. Move it below the rules that override it, or remove it. A common cause is a slice of layers, such as
        `layers[-4:]`, in a model that has no more layers than that: a percentage (`layers[-15%:]`) leaves some in any
        model.

        If the rule quantizes, and a slice or a condition is part of the reason, it is an error: `policyc apply`
        refuses to run instead of quantizing nothing. Checked with a program and when a loss is compiled.
        """,
        bad="""
        mlp.up -> fp8
        mlp.* where k > 1024 -> nvfp4(sr=grad)
        """,
        good="""
        mlp.* where k > 1024 -> nvfp4(sr=grad)
        mlp.up -> fp8
        """,
        needs_program=True,
    ),
    make_rule(
        "padded-gemm",
        """The contracted size of a quantized GEMM is not a multiple of the block.

        Blocks of 16 (NVFP4) or 32 (MX formats) run along the contracted size: k in fprop, n in dgrad, m in wgrad. If
        that size is not a multiple of the block, zeros are added. The result is exact, but the GPU does the work of
        the larger size. Keep such GEMMs, or change the size. Checked only with a program.
        """,
        bad="* -> mxfp8",
        good="""
        * -> mxfp8
        * where k % 32 != 0 -> keep
        """,
        needs_program=True,
    ),
    make_rule(
        "quantized-embedding",
        """A rule quantizes the embedding of this model to 8 bits.

        Some models look up tokens by a GEMM with one-hot rows. A broad rule matches this GEMM too. It takes almost no
        time, and every token passes through it. Add a rule that keeps it.

        The embedding is recognized by its one-hot operand or by its name. In 4 bits it is an `embedding-in-4-bits`.
        Checked only with a program.
        """,
        bad="* -> fp8",
        good="""
        * -> fp8
        *embed* -> keep
        """,
        needs_program=True,
    ),
    make_rule(
        "quantized-head",
        """A rule quantizes the output head of this model to 8 bits.

        The head computes the logits from the last hidden state. It is a few percent of the FLOPs, and its errors go
        directly into the loss. Published recipes keep it in high precision. Add a rule that keeps it.

        The head is recognized by its name, by a weight that it shares with the embedding, or as the last and widest
        GEMM of the loss. In 4 bits it is a `head-in-4-bits`. Checked only with a program.
        """,
        bad="* -> fp8",
        good="""
        * -> fp8
        lm_head -> keep
        """,
        needs_program=True,
    ),
    make_rule(
        "shredded-scan",
        """A rule splits a scanned stack into many scans.

        Each part of a split scan is compiled separately, so compilation takes longer with every part. Two or three
        parts are normal for layer slices. More are reported. Select layers that are next to each other. Checked only
        with a program.
        """,
        bad="layers[::2].mlp -> fp8",
        good="layers[:-4].mlp -> fp8",
        needs_program=True,
    ),
    make_rule(
        "slower-than-bf16",
        """A quantized GEMM is slower than in bf16.

        Quantizing an operand reads and writes all of it. If one of the three sizes of a product is small, this costs
        more than the faster product saves. A format that the GPU does not multiply natively is emulated, which is
        never faster. Leave such GEMMs in bf16.

        The cost model decides this for all products of a site together, with the cheapest quantizers that it knows;
        see `policyc estimate`. It assumes a GB200, or the GPU of `--target`. Checked only with a program.
        """,
        bad="* -> nvfp4",
        good="""
        * -> nvfp4
        * where n < 1024 -> bf16
        """,
        needs_program=True,
    ),
    make_rule(
        "slower-than-fp8",
        """A GEMM in four bits is slower than in fp8.

        Four bits double the rate of a GEMM. Their quantizers cost more than those of fp8: more passes over memory, and
        with XLA a result in fp32. If a product is small, or if the backend has no fused quantizers, the step gets
        slower than in fp8, which is also more accurate. Install Transformer Engine, or use fp8 for such GEMMs.

        The cost model decides this for all products of a site together, on one device, with the backend that would run
        them; see `policyc estimate`. It assumes a GB200, or the GPU of `--target`. Checked only with a program, for
        GPUs that multiply both formats.
        """,
        bad="* -> nvfp4",
        good="""
        * -> nvfp4
        * where n < 2048 -> fp8
        """,
        needs_program=True,
    ),
    make_rule(
        "split-scan",
        """A rule splits a scanned stack into several scans.

        A scan has one body for all its layers. If a policy treats layers differently, the scan becomes consecutive
        scans, each with its own body. The results are the same, and compilation takes a little longer. This is not a
        fault: the note makes a split at an unexpected layer visible. If you did not intend it, correct the slice. More
        than three parts are reported as `shredded-scan`. Checked only with a program.
        """,
        bad="""
        layers[3:-4].mlp -> fp8  # three parts, although the first three layers were not meant to differ
        """,
        good="layers[:-4].mlp -> fp8",
        severity=Severity.NOTE,
        needs_program=True,
    ),
    make_rule(
        "transformer-engine-shape",
        """Transformer Engine does not support the shape of a GEMM.

        Its NVFP4 GEMMs need a contracted size in multiples of 32, other sizes in multiples of 16, and no batch
        dimension (so nothing under `vmap`). Its Hadamard transform needs bfloat16, contracted sizes in multiples of 64
        and other sizes in multiples of 128. Other shapes run on another backend, with the same result. Change the
        sizes, or keep such GEMMs.

        Only 4-bit rules are checked, with the limits that `--backend te` uses. Checked only with
        a program.
        """,
        bad="* -> nvfp4(rht=wgrad, sr=grad)",
        good="""
        * -> nvfp4(rht=wgrad, sr=grad)
        * where k % 32 != 0 -> keep
        """,
        severity=Severity.NOTE,
        needs_program=True,
    ),
    make_rule(
        "unmatched-rule",
        """A rule matches no site of the model.

        A misspelled name, or a name that another framework uses, matches nothing, and the sites that the rule was
        written for stay as they are. Correct the name: the message suggests real paths of the program. If a rule is
        meant for other models, write `expect 0`.

        A rule that quantizes to 8 bits or fewer is an error, and so is one that protects layers by index from rules
        that quantize, such as `layers[-4:].* -> bf16`: `policyc apply` refuses to run them. Any other rule is a
        warning. The first loss of the program is checked, with `policyc lint POLICY PROGRAM` and when a loss is
        compiled.
        """,
        bad="mpl.* -> fp8",
        good="mlp.* -> fp8",
        needs_program=True,
    ),
)
