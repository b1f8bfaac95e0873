// The verdict, the two runs and the figures that a reader looks for first.

function headline(root) {
  const { tone } = VERDICTS[DATA.verdict];
  document.title = `${DATA.verdict}: ${runName(DATA.a)} and ${runName(DATA.b)}`;
  const run = (letter, i) =>
    el(
      "div",
      { class: "run" },
      side(letter),
      el(
        "div",
        {},
        el("strong", {}, runName(DATA[letter])),
        el("div", { class: "quiet" }, DATA.kinds[i]),
        el("div", { class: "source" }, DATA[letter]),
      ),
    );
  root.classList.add(tone);
  root.append(
    el(
      "div",
      { class: "headline" },
      el("p", { class: "brand" }, el("b", {}, "lockstep"), " compare"),
      el("h1", {}, badge(DATA.verdict, true)),
      el("p", { class: "reason" }, DATA.reason),
      power(),
      el("div", { class: "runs" }, run("a", 0), el("span", { class: "against" }, "against"), run("b", 1)),
      facts(),
      tiles(),
    ),
  );
}

/** What the verdict would have seen with 95 %, by judged metric. */
function power() {
  const told = displayOrder().filter((i) => DATA.metrics[i].power !== null);
  return told
    .slice(0, 2)
    .map((i) => el("p", { class: "power quiet" }, metricName(DATA.metrics[i].name), ": ", results(i), seen(i)));
}

/** What the bar and the statistical test say, each by itself, and which planned steps are missing. */
function results(i) {
  const { bar_result: bar, test_result: test, incomplete } = DATA.metrics[i];
  const parts = [bar && `bar ${bar}`, test && `statistical test: ${test}`, incomplete && `incomplete: ${incomplete}`];
  const told = parts.filter(Boolean).join("; ");
  return told ? `${told}. ` : "";
}

function seen(i) {
  const at = (name, style) => figure(`metrics.${i}.power.${name}`, style);
  return [
    "seen with 95 %: a drift of ",
    at("drift"),
    ", a collapse of ",
    at("collapse"),
    " in the last ",
    at("collapse_steps", "count"),
    " steps; one of ten noise sd as late as step ",
    at("latest_step", "step"),
    "; drift in truth within ",
    at("drift_within"),
  ];
}

function words(value) {
  if (value === null || value === undefined || value === "") return MISSING;
  if (Array.isArray(value)) return value.map(words).join(", ");
  if (typeof value === "object")
    return Object.entries(value)
      .map(([key, item]) => `${key} ${words(item)}`)
      .join(", ");
  return String(value);
}

/** What is known of both sides; a fact that both share is written once. */
function facts() {
  const entries = Object.entries(DATA.facts);
  if (entries.length === 0) return null;
  const value = ([a, b]) =>
    words(a) === words(b) ? [words(a)] : [side("a"), ` ${words(a)}`, el("br"), side("b"), ` ${words(b)}`];
  return el(
    "dl",
    { class: "facts" },
    entries.map(([name, pair]) => el("div", {}, el("dt", {}, name), el("dd", {}, value(pair)))),
  );
}

function tile(label, content, foot) {
  return el(
    "div",
    { class: "tile" },
    el("div", { class: "tile-label" }, label),
    el("div", { class: "tile-value" }, content),
    el("div", { class: "tile-foot" }, foot),
  );
}

function tiles() {
  const judged = displayOrder()
    .filter((i) => DATA.metrics[i].verdict !== null)
    .slice(0, 2);
  const figures = judged.map((i) =>
    tile(
      [DATA.metrics[i].name, " ", el("span", { class: "quiet" }, "mean error, absolute")],
      figure(`metrics.${i}.figures.mean_error_percent`, "percent"),
      DATA.metrics[i].bar_percent === null
        ? "no bar"
        : [
            "bar ",
            figure(`metrics.${i}.bar_percent`, "bar"),
            DATA.metrics[i].scaled ? " of the scaled error, which is " : ", scaled error ",
            figure(`metrics.${i}.figures.scaled_error_percent`, "percent"),
          ],
    ),
  );
  const weights = ["blocks", "matters", "harmless"].map((weight) => [
    weight,
    DATA.differences.filter((one) => one.weight === weight).length,
  ]);
  const differing = weights
    .filter(([, count]) => count > 0)
    .map(([weight, count]) => `${weight} ${show(count, "count")}`)
    .join(", ");
  return el(
    "div",
    { class: "tiles" },
    figures,
    tile("Throughput, B over A", figure("throughput.ratio", "ratio"), [
      "at equal lengths ",
      figure("throughput.matched_ratio", "ratio"),
    ]),
    DATA.setup_known
      ? tile("Differences of set-up", show(DATA.differences.length, "count"), differing || "none found")
      : tile("Differences of set-up", "unknown", "only run folders tell their set-up"),
  );
}
