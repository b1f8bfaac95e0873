// The verdict and the table of metrics.

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

/** Facts of both sides; a fact that both share is shown once. */
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

/** Judged metrics first, the worst verdict before the others, otherwise as they came. */
function displayOrder() {
  const rank = { "out of step": 0, "not comparable": 1, "cannot tell": 2, "within noise": 3, "in step": 4 };
  const place = (i) => (DATA.metrics[i].verdict === null ? 5 : rank[DATA.metrics[i].verdict]);
  return DATA.metrics.map((_, i) => i).sort((left, right) => place(left) - place(right) || left - right);
}

/** What is looked at first: the first judged metric; where none is judged, the one with the most steps. */
function firstChoice() {
  const order = displayOrder();
  const steps = (i) => DATA.metrics[i].figures.steps;
  return DATA.metrics[order[0]].verdict !== null
    ? order[0]
    : order.reduce((best, i) => (steps(i) > steps(best) ? i : best));
}

/** Not judged, and one and the same number at every step of both sides: nothing to look at. */
function isConstant(i) {
  const { a, b, verdict } = DATA.metrics[i];
  return verdict === null && a[0] !== null && [...a, ...b].every((value) => value === a[0]);
}

const COLUMNS = [
  [
    "Metric",
    (i) => [
      metricName(DATA.metrics[i].name),
      el("span", { class: "kind" }, DATA.metrics[i].kind === "other" ? "" : DATA.metrics[i].kind),
    ],
  ],
  [
    "Verdict",
    (i) => [
      badge(DATA.metrics[i].verdict),
      DATA.metrics[i].verdict === null ? null : el("div", { class: "why" }, DATA.metrics[i].decided_by),
      DATA.metrics[i].matching ? el("div", { class: "why" }, DATA.metrics[i].matching) : null,
    ],
  ],
  ["Mean error", (i) => figure(`metrics.${i}.figures.mean_error_percent`, "percent"), "absolute"],
  ["Scaled error", (i) => figure(`metrics.${i}.figures.scaled_error_percent`, "percent"), "relative"],
  ["Bar", (i) => figure(`metrics.${i}.bar_percent`, "bar"), ""],
  [
    "Worst",
    (i) => [
      figure(`metrics.${i}.figures.worst`, "number"),
      el("span", { class: "why" }, " at ", figure(`metrics.${i}.figures.worst_step`, "step")),
    ],
    "at step",
  ],
  ["Drift", (i) => figure(`metrics.${i}.figures.drift`, "signed"), "mean B − A"],
  ["Correlation", (i) => figure(`metrics.${i}.figures.correlation`, "number"), ""],
  ["Parted at", (i) => figure(`metrics.${i}.figures.parted_at`, "step"), "step"],
];

/** Hides rows behind one that says how many they are; null where there is none. */
function foldAway(rows) {
  if (rows.length === 0) return null;
  for (const row of rows) row.hidden = true;
  const count = `${show(rows.length, "count")} constant metric${rows.length > 1 ? "s" : ""}, the same on both sides`;
  const button = el("button", { type: "button", class: "fold", "aria-expanded": "false" }, count);
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "false";
    button.setAttribute("aria-expanded", String(open));
    for (const row of rows) row.hidden = !open;
  });
  return el("tr", { class: "fold" }, el("td", { colspan: COLUMNS.length }, button));
}

function metricTable(root, choose) {
  if (DATA.metrics.length === 0) {
    root.append(el("p", { class: "note" }, "The two sides have no metric with common steps."));
    return;
  }
  const head = el(
    "tr",
    {},
    COLUMNS.map(([name, , unit], n) =>
      el("th", { scope: "col", class: n > 1 ? "number" : null }, name, unit ? el("small", {}, unit) : null),
    ),
  );
  const rows = displayOrder().map((i) =>
    el(
      "tr",
      { "data-metric": i, tabindex: 0, class: DATA.metrics[i].verdict === null ? "unjudged" : "judged" },
      COLUMNS.map(([, cell], n) => el("td", { class: n > 1 ? "number" : null }, cell(i))),
    ),
  );
  const folded = rows.filter((row) => isConstant(Number(row.dataset.metric)));
  const shown = rows.filter((row) => !folded.includes(row));
  const unfold = foldAway(folded);
  const select = (row) => {
    for (const one of rows) one.setAttribute("aria-selected", String(one === row));
    choose(Number(row.dataset.metric));
  };
  rows.forEach((row, n) => {
    row.addEventListener("click", () => select(row));
    row.addEventListener("keydown", (event) => {
      const next = { ArrowDown: rows[n + 1], ArrowUp: rows[n - 1], Enter: row, " ": row }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      next.focus();
      select(next);
    });
  });
  root.append(
    el(
      "div",
      { class: "scroll tall" },
      el("table", { class: "metrics" }, el("thead", {}, head), el("tbody", {}, shown, unfold, folded)),
    ),
  );
  select(rows.find((row) => Number(row.dataset.metric) === firstChoice()));
}
