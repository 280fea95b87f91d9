// What the short words of the page mean. A word is explained where it stands, and all that occur in a list below the cards.

const WORDS = [
  [/^fprop$/, "forward product: activation × weight"],
  [/^dgrad$/, "gradient of the activation: gradient × weight"],
  [/^wgrad$/, "gradient of the weight: activation × gradient"],
  [/^lhs$/, "left operand of a product without a weight"],
  [/^rhs$/, "right operand of a product without a weight"],
  [/^1x(\d+)$/, "$1 values along the contraction share a scale"],
  [/^(\d+)x(\d+)$/, "a tile of $1 × $2 values shares a scale"],
  [/^tensor$/, "one scale for the whole tensor"],
  [/^e(\d)m(\d)$/, "8-bit elements: $1 bits of exponent, $2 of mantissa"],
  [/^rht(\d+)$/, "random Hadamard transform of $1 values before quantization"],
  [/^sr$/, "stochastic rounding; otherwise to nearest"],
  [/^ms_eden$/, "unbiased rounding by corrected scales"],
  [/^four_over_six$/, "each block takes the better of two scales"],
  [/^scale_rounding=(.*)$/, "how scales are rounded: $1"],
  [/^sums=fast$/, "the GEMM may add in fewer bits than fp32"],
  [/^mean_split$/, "the mean is multiplied on its own, in high precision"],
  [/^outer=(.*)$/, "what the fp32 scale covers: $1"],
  [/^once for \d+ sites$/, "quantized once; all of these sites read the codes"],
  [/^once per step$/, "quantized once per step, outside the loss"],
  [/^native$/, "the GPU multiplies in this format"],
  [/^emulated$/, "same numbers, multiplied in a wider format: slower"],
  [/^opaque$/, "the compiler cannot change this product"],
];

/** What a word means; empty if it is not a short word. */
function explain(word) {
  const [pattern, text] = WORDS.find(([each]) => each.test(word)) ?? [];
  return pattern ? word.replace(pattern, text) : "";
}

/** The list of the short words that occur on the page. */
function drawWords(words) {
  const known = [...new Set(words)].filter(explain);
  known.sort((a, b) => WORDS.findIndex(([each]) => each.test(a)) - WORDS.findIndex(([each]) => each.test(b)));
  byId("words").replaceChildren(...known.map((word) => h("span", {}, h("b", {}, word), " ", explain(word))));
}
