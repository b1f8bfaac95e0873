// The parts of the page below the chart.

function warning(text) {
  return el("p", { class: "warning" }, el("b", { "aria-hidden": "true" }, "!"), text);
}

function throughput(root) {
  const { phases, warnings } = DATA.throughput;
  const rate = (letter) =>
    el(
      "div",
      { class: "rate" },
      side(letter),
      figure(`throughput.${letter}`, "rate"),
      el("span", { class: "quiet" }, " tokens/s"),
    );
  root.append(
    el(
      "div",
      { class: "card" },
      el(
        "div",
        { class: "tiles plain" },
        tile("First 4 steps, B over A", figure("throughput.ratio", "ratio"), [rate("a"), rate("b")]),
        tile("At equal lengths, B over A", figure("throughput.matched_ratio", "ratio"), [
          "over ",
          figure("throughput.matched_steps", "count"),
          " matched steps",
        ]),
      ),
      phases.length === 0
        ? el("p", { class: "quiet" }, "No times by phase on both sides.")
        : el(
            "div",
            { class: "phases" },
            phases.map((phase, i) => phaseBars(phase, i)),
          ),
      warnings.map(warning),
    ),
  );
}

/** Bars of one phase with a separate scale: phases differ by orders of magnitude. */
function phaseBars(phase, i) {
  const most = Math.max(phase.a, phase.b);
  const bar = (letter) => {
    const fill = el("div", { class: `fill ${letter}` });
    fill.style.width = `${(100 * phase[letter]) / most}%`;
    return [
      side(letter),
      el("div", { class: "track" }, fill),
      el("div", { class: "number" }, figure(`throughput.phases.${i}.${letter}`, "rate")),
    ];
  };
  return el(
    "div",
    { class: "phase" },
    el("div", { class: "phase-name" }, el("strong", {}, phase.name), el("span", { class: "quiet" }, "tokens/s")),
    el("div", { class: "phase-bars" }, bar("a"), bar("b")),
    el("div", { class: "phase-ratio" }, figure(`throughput.phases.${i}.ratio`, "ratio")),
  );
}

/** A side's value of a difference: a number like every other figure, anything else in words. */
function told(difference, letter) {
  const value = difference[letter];
  return typeof value === "number"
    ? figure(`differences.${DATA.differences.indexOf(difference)}.${letter}`, "plain")
    : words(value);
}

const WEIGHTS = { blocks: "bad", matters: "noise", harmless: "quiet" };

function environment(root) {
  const { differences, unknown, remarks } = DATA;
  if (differences.length === 0) {
    const none = DATA.setup_known
      ? "Nothing of what both sides tell differs."
      : "Unknown: only run folders tell their set-up.";
    root.append(el("div", { class: "card" }, el("p", {}, none)));
  } else {
    const head = ["Weight", "Part", "Key", "A", "B", "Likely effect"].map((name) => el("th", { scope: "col" }, name));
    const order = Object.keys(WEIGHTS);
    const rows = [...differences]
      .sort((left, right) => order.indexOf(left.weight) - order.indexOf(right.weight))
      .map((one) =>
        el(
          "tr",
          {},
          el("td", {}, el("span", { class: `badge ${WEIGHTS[one.weight]}` }, one.weight)),
          el("td", { class: "quiet" }, one.part),
          el("td", {}, el("code", {}, one.key)),
          el("td", { class: "value" }, told(one, "a")),
          el("td", { class: "value" }, told(one, "b")),
          el("td", { class: "effect" }, one.effect),
        ),
      );
    root.append(
      el(
        "div",
        { class: "card flush" },
        el(
          "div",
          { class: "scroll" },
          el("table", { class: "differences" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
        ),
      ),
    );
  }
  root.append(...listed("Remarks", remarks), ...listed("Not known", unknown));
}

/** A card with a list, where there is anything to list. */
function listed(title, sentences) {
  if (sentences.length === 0) return [];
  return [
    el(
      "div",
      { class: "card unknown" },
      el("h3", {}, title),
      el(
        "ul",
        {},
        sentences.map((one) => el("li", {}, one)),
      ),
    ),
  ];
}

function promptText(prompt) {
  if (!Array.isArray(prompt)) return words(prompt);
  return prompt.map((message) => `${message.role ?? ""}: ${words(message.content)}`).join("\n");
}

function sharedStart(left, right) {
  let length = 0;
  while (length < left.length && length < right.length && left[length] === right[length]) length += 1;
  return length;
}

function samples(root) {
  const pairs = DATA.samples.map((pair, i) => [pair, i]).filter(([[a, b]]) => a !== null || b !== null);
  if (pairs.length === 0) {
    root.append(el("div", { class: "card" }, el("p", {}, "No samples of the same prompts on both sides.")));
    return;
  }
  root.append(...pairs.map(([pair, i]) => samplePair(pair, i)));
}

function samplePair([a, b], i) {
  const known = a ?? b;
  const texts = [a, b].map((one) => (one === null ? null : words(one.response)));
  const same = texts[0] !== null && texts[1] !== null ? sharedStart(texts[0], texts[1]) : 0;
  const alike = texts.includes(null) || texts[0] === texts[1];
  const remark = texts.includes(null)
    ? "only one side has it"
    : alike
      ? "the same on both sides"
      : `the same for ${show(same, "count")} characters`;
  const response = (one, n, letter) =>
    el(
      "div",
      { class: "response" },
      side(letter),
      one === null
        ? el("p", { class: "quiet" }, "no response")
        : [
            el(
              "pre",
              {},
              alike
                ? texts[n]
                : [
                    el("span", { class: "alike" }, texts[n].slice(0, same)),
                    el("mark", { class: letter }, texts[n].slice(same)),
                  ],
            ),
            el(
              "p",
              { class: "quiet" },
              ["score", "tokens", "advantage"]
                .filter((key) => typeof one[key] === "number")
                .map((key) => [
                  `${key} `,
                  figure(`samples.${i}.${n}.${key}`, key === "tokens" ? "count" : "number"),
                  "   ",
                ]),
              one.stop ? `stop: ${words(one.stop)}` : "",
            ),
          ],
    );
  return el(
    "div",
    { class: "card sample" },
    el(
      "div",
      { class: "prompt" },
      el(
        "div",
        { class: "quiet" },
        known.step === undefined ? "prompt" : `prompt, step ${show(known.step, "step")}`,
        " · ",
        remark,
      ),
      el("pre", {}, promptText(known.prompt)),
    ),
    el("div", { class: "responses" }, response(a, 0, "a"), response(b, 1, "b")),
  );
}

const MEANINGS = [
  [
    "Mean error",
    "The mean of |A − B| over the common steps, times 100: an absolute difference, written as a percentage.",
  ],
  ["Scaled error", "The sum of |A − B| over the sum of |A|: relative, and not at the mercy of one step near 0."],
  [
    "Mean relative error",
    "The mean of |A − B| / |A| over the steps where A is not 0. It grows without limit where A is close to 0.",
  ],
  ["Drift", "The mean of B − A. As large as the mean error: one curve lies on one side of the other."],
  [
    "Parted at",
    "The first step from which on the curves stay apart by more than the bar and by more than noise. A dash: they end together, or nothing is known against it.",
  ],
  [
    "Within noise",
    "The bar is missed, but drift, every window, the end, the trend and the scatter are what repeats of one side do, and enough would have been seen.",
  ],
  [
    "Cannot tell",
    "Too few steps or repeats, or too much noise: neither a pass nor a failure. The reason says what would suffice.",
  ],
  ["Seen with 95 %", "The smallest drift and late collapse that would have been found in 95 of 100 such comparisons."],
  [
    "The chart",
    "Drag to zoom, double click to see all steps, click an entry of the legend to hide a curve. Values under the pointer are the logged ones, also where the lines are smoothed.",
  ],
];

function meaning(root) {
  const rounded =
    DATA.rounded_to === null
      ? []
      : [
          [
            "Rounding",
            `This page holds its many points with ${show(DATA.rounded_to, "count")} digits; the figures were computed from the full values.`,
          ],
        ];
  root.append(
    el(
      "dl",
      { class: "card meaning" },
      [...MEANINGS, ...rounded].map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))),
    ),
  );
}

headline(document.getElementById("headline"));
const explorerRoot = document.getElementById("explorer");
if (DATA.metrics.length === 0) explorerRoot.remove();
metricTable(document.getElementById("table"), DATA.metrics.length === 0 ? null : makeExplorer(explorerRoot).choose);
throughput(document.getElementById("throughput"));
environment(document.getElementById("environment"));
samples(document.getElementById("samples"));
meaning(document.getElementById("meaning"));
