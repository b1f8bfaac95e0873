// The report of a comparison: the verdict, the table of metrics, throughput, setup differences, samples, explanations.

function headline(root) {
  document.title = `${DATA.verdict}: ${runName(DATA.a)} and ${runName(DATA.b)}`;
  const run = (letter, i) => {
    const name = el("strong", runName(DATA[letter]));
    return el("div.run", side(letter), el("div", name, el("div.quiet", DATA.kinds[i]), el("div.source", DATA[letter])));
  };
  root.classList.add(VERDICTS[DATA.verdict].tone);
  root.append(
    el(
      "div.headline",
      el("p.brand", el("b", "lockstep"), " compare"),
      el("h1", badge(DATA.verdict, true)),
      el("p.reason", DATA.reason),
      displayOrder().filter((i) => DATA.metrics[i].power !== null).slice(0, 2).map(testResult),
      el("div.runs", run("a", 0), el("span.against", "against"), run("b", 1)),
      facts(),
      tiles(),
    ),
  );
}

/** The results of the bar and of the statistical test, missing planned steps, and the power of the test. */
function testResult(i) {
  const { name, bar_result: bar, test_result: test, incomplete } = DATA.metrics[i];
  const parts = [bar && `bar ${bar}`, test && `statistical test: ${test}`, incomplete && `incomplete: ${incomplete}`];
  const results = parts.filter(Boolean).join("; ");
  return el("p.power.quiet", metricName(name), ": ", results && `${results}. `, "found with 95 %: ", detectable(i));
}

function words(value) {
  if (value === null || value === undefined || value === "") return MISSING;
  if (Array.isArray(value)) return value.map(words).join(", ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value).map(([key, item]) => `${key} ${words(item)}`).join(", ");
}

/** Facts of both sides; a fact that both share is shown once. */
function facts() {
  const entries = Object.entries(DATA.facts);
  const value = ([a, b]) =>
    words(a) === words(b) ? words(a) : [side("a"), ` ${words(a)}`, el("br"), side("b"), ` ${words(b)}`];
  return entries.length === 0 ? null : el("dl.facts", definitions(entries.map(([name, pair]) => [name, value(pair)])));
}

const tile = (label, content, foot) =>
  el("div.tile", el("div.tile-label", label), el("div.tile-value", content), el("div.tile-foot", foot));

function tiles() {
  const judged = displayOrder().filter((i) => DATA.metrics[i].verdict !== null);
  const metricTile = (i) => {
    const { name, bar_percent: bar, scaled } = DATA.metrics[i];
    const error = (kind) => figure(`metrics.${i}.figures.${kind}_error_percent`, "percent");
    const relation = scaled ? " of the scaled error, which is " : ", scaled error ";
    const foot = ["bar ", figure(`metrics.${i}.bar_percent`, "bar"), relation, error("scaled")];
    const label = [name, " ", el("span.quiet", "mean error, absolute")];
    return tile(label, error("mean"), bar === null ? "no bar" : foot);
  };
  const counts = Object.keys(WEIGHTS)
    .map((weight) => [weight, DATA.differences.filter((difference) => difference.weight === weight).length])
    .filter(([, count]) => count > 0)
    .map(([weight, count]) => `${weight} ${show(count, "count")}`);
  const matched = ["at equal lengths ", figure("throughput.matched_ratio", "ratio")];
  return el(
    "div.tiles",
    judged.slice(0, 2).map(metricTile),
    tile("Throughput, B over A", figure("throughput.ratio", "ratio"), matched),
    DATA.setup_known
      ? tile("Set-up differences", show(DATA.differences.length, "count"), counts.join(", ") || "none found")
      : tile("Set-up differences", "unknown", "only run folders contain their set-up"),
  );
}

/** Judged metrics first, by their verdict from the worst to the best. Other metrics keep their order. */
function displayOrder() {
  const ranks = ["out of step", "not comparable", "cannot tell", "within noise", "in step", null];
  const rank = (i) => ranks.indexOf(DATA.metrics[i].verdict);
  return DATA.metrics.map((_, i) => i).sort((left, right) => rank(left) - rank(right) || left - right);
}

/** The metric that is shown first: the first judged one; if none is judged, the one with the most steps. */
function firstChoice() {
  const order = displayOrder();
  const steps = (i) => DATA.metrics[i].figures.steps;
  if (DATA.metrics[order[0]].verdict !== null) return order[0];
  return order.reduce((best, i) => (steps(i) > steps(best) ? i : best));
}

/** Not judged, and the same number at every step of both sides. */
function isConstant(i) {
  const { a, b, verdict } = DATA.metrics[i];
  return verdict === null && a[0] !== null && [...a, ...b].every((value) => value === a[0]);
}

/** Name, unit and cell of each column. The cell receives a metric and a function that shows one of its figures. */
const COLUMNS = [
  ["Metric", "", ({ name, kind }) => [metricName(name), el("span.kind", kind === "other" ? "" : kind)]],
  [
    "Verdict",
    "",
    ({ verdict, decided_by: reason, matching }) => [
      badge(verdict),
      verdict !== null && el("div.why", reason),
      matching && el("div.why", matching),
    ],
  ],
  ["Mean error", "absolute", (_, at) => at("figures.mean_error_percent", "percent")],
  ["Scaled error", "relative", (_, at) => at("figures.scaled_error_percent", "percent")],
  ["Bar", "", (_, at) => at("bar_percent", "bar")],
  ["Worst", "at step", (_, at) => [at("figures.worst"), el("span.why", " at ", at("figures.worst_step", "count"))]],
  ["Drift", "mean B − A", (_, at) => at("figures.drift", "signed")],
  ["Correlation", "", (_, at) => at("figures.correlation")],
  ["Diverged at", "step", (_, at) => at("figures.parted_at", "count")],
];

/** Hides rows behind a row with their number; null if there are none. */
function foldRows(rows) {
  if (rows.length === 0) return null;
  for (const row of rows) row.hidden = true;
  const toggle = (event) => {
    const open = event.currentTarget.getAttribute("aria-expanded") === "false";
    event.currentTarget.setAttribute("aria-expanded", String(open));
    for (const row of rows) row.hidden = !open;
  };
  const label = `${plural(rows.length, "constant metric")}, the same on both sides`;
  const button = el("button.fold", { type: "button", "aria-expanded": "false", onclick: toggle }, label);
  return el("tr.fold", el("td", { colspan: COLUMNS.length }, button));
}

function metricTable(root, choose) {
  if (DATA.metrics.length === 0) {
    root.append(el("p.note", "The two sides have no metric with common steps."));
    return;
  }
  const column = (n) => (n > 1 ? "number" : null);
  const head = COLUMNS.map(([name, unit], n) =>
    el("th", { scope: "col", class: column(n) }, name, unit && el("small", unit)),
  );
  const rows = displayOrder().map((i) => {
    const metric = DATA.metrics[i];
    const at = (name, style) => figure(`metrics.${i}.${name}`, style);
    const cells = COLUMNS.map(([, , cell], n) => el("td", { class: column(n) }, cell(metric, at)));
    return el(`tr.${metric.verdict === null ? "unjudged" : "judged"}`, { "data-metric": i, tabindex: 0 }, cells);
  });
  const select = (row) => {
    for (const other of rows) other.setAttribute("aria-selected", String(other === row));
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
  const constant = rows.filter((row) => isConstant(Number(row.dataset.metric)));
  const body = el("tbody", rows.filter((row) => !constant.includes(row)), foldRows(constant), constant);
  root.append(el("div.scroll.tall", el("table.metrics", el("thead", el("tr", head)), body)));
  select(rows.find((row) => Number(row.dataset.metric) === firstChoice()));
}

function throughput(root) {
  const { phases, warnings } = DATA.throughput;
  const rate = (letter) =>
    el("div.rate", side(letter), figure(`throughput.${letter}`), el("span.quiet", " tokens/s"));
  const matched = ["over ", figure("throughput.matched_steps", "count"), " matched steps"];
  root.append(
    el(
      "div.card",
      el(
        "div.tiles.plain",
        tile("First 4 steps, B over A", figure("throughput.ratio", "ratio"), [rate("a"), rate("b")]),
        tile("At equal lengths, B over A", figure("throughput.matched_ratio", "ratio"), matched),
      ),
      phases.length === 0
        ? el("p.quiet", "The two sides have no common phase times.")
        : el("div.phases", phases.map(phaseBars)),
      warnings.map((text) => el("p.warning", el("b", { "aria-hidden": "true" }, "!"), text)),
    ),
  );
}

/** Bars of one phase with a separate scale: phases differ by orders of magnitude. */
function phaseBars(phase, i) {
  const bar = (letter) => {
    const fill = el(`div.fill.${letter}`);
    fill.style.width = `${(100 * phase[letter]) / Math.max(phase.a, phase.b)}%`;
    return [side(letter), el("div.track", fill), el("div.number", figure(`throughput.phases.${i}.${letter}`))];
  };
  return el(
    "div.phase",
    el("div.phase-name", el("strong", phase.name), el("span.quiet", "tokens/s")),
    el("div.phase-bars", bar("a"), bar("b")),
    el("div.phase-ratio", figure(`throughput.phases.${i}.ratio`, "ratio")),
  );
}

function environment(root) {
  const { differences, unknown, remarks, known, setup_known: complete } = DATA;
  const concerned = (each) => (each.everywhere ? "all metrics" : each.metrics.join(", "));
  const expected = known.map((each) => `${each.key}: ${each.how} (${concerned(each)})`);
  const lists = [["Known differences of the migration", expected], ["Remarks", remarks], ["Unknown", unknown]];
  if (differences.length === 0) {
    const none = complete ? "No set-up difference was found." : "Unknown: only run folders contain their set-up.";
    root.append(el("div.card", el("p", none)));
  } else {
    const order = Object.keys(WEIGHTS);
    const sorted = [...differences].sort((left, right) => order.indexOf(left.weight) - order.indexOf(right.weight));
    const value = (difference, letter) =>
      typeof difference[letter] === "number"
        ? figure(`differences.${differences.indexOf(difference)}.${letter}`, "plain")
        : words(difference[letter]);
    const row = (difference) =>
      el(
        "tr",
        el("td", weightBadge(difference.weight)),
        el("td.quiet", difference.part),
        el("td", el("code", difference.key)),
        ["a", "b"].map((letter) => el("td.value", value(difference, letter))),
        el("td.effect", difference.effect),
      );
    const head = ["Weight", "Part", "Key", "A", "B", "Likely effect"];
    root.append(tableCard("differences", head, sorted.map(row)));
  }
  for (const [title, items] of lists) {
    const list = el("ul", items.map((text) => el("li", text)));
    if (items.length > 0) root.append(el("div.card.unknown", el("h3", title), list));
  }
}

function promptText(prompt) {
  if (!Array.isArray(prompt)) return words(prompt);
  return prompt.map((message) => `${message.role ?? ""}: ${words(message.content)}`).join("\n");
}

function commonPrefix(left, right) {
  let length = 0;
  while (length < left.length && length < right.length && left[length] === right[length]) length += 1;
  return length;
}

function samples(root) {
  const pairs = DATA.samples.map((pair, i) => [pair, i]).filter(([[a, b]]) => a !== null || b !== null);
  if (pairs.length > 0) root.append(...pairs.map(([pair, i]) => samplePair(pair, i)));
  else root.append(el("div.card", el("p", "No samples of the same prompts on both sides.")));
}

function samplePair([a, b], i) {
  const { step, prompt } = a ?? b;
  const texts = [a, b].map((sample) => (sample === null ? null : words(sample.response)));
  const single = texts.includes(null);
  const equal = single || texts[0] === texts[1];
  const prefix = single ? 0 : commonPrefix(...texts);
  const difference = equal ? "the same on both sides" : `the same for ${show(prefix, "count")} characters`;
  const response = (sample, n, letter) => {
    if (sample === null) return el("div.response", side(letter), el("p.quiet", "no response"));
    const parts = [el("span.alike", texts[n].slice(0, prefix)), el(`mark.${letter}`, texts[n].slice(prefix))];
    const values = ["score", "tokens", "advantage"]
      .filter((key) => typeof sample[key] === "number")
      .map((key) => [`${key} `, figure(`samples.${i}.${n}.${key}`, key === "tokens" ? "count" : "number"), "   "]);
    const stop = sample.stop ? `stop: ${words(sample.stop)}` : "";
    return el("div.response", side(letter), el("pre", equal ? texts[n] : parts), el("p.quiet", values, stop));
  };
  const title = step === undefined ? "prompt" : `prompt, step ${show(step, "count")}`;
  const remark = el("div.quiet", title, " · ", single ? "only one side has it" : difference);
  return el(
    "div.card.sample",
    el("div.prompt", remark, el("pre", promptText(prompt))),
    el("div.responses", response(a, 0, "a"), response(b, 1, "b")),
  );
}

const MEANINGS = [
  [
    "Mean error",
    "The mean of |A − B| over the common steps, times 100. It is an absolute difference, written as a percentage.",
  ],
  ["Scaled error", "The sum of |A − B| divided by the sum of |A|. It is relative. One step near 0 cannot dominate it."],
  ["Mean relative error", "The mean of |A − B| / |A| over the steps where A is not 0. It is large if A is near 0."],
  ["Drift", "The mean of B − A. If it is as large as the mean error, one curve is always above the other."],
  [
    "Diverged at",
    "The first step of the final stretch in which the curves differ by more than the bar and by more than noise. " +
      "A dash: the curves end together, or no difference was found.",
  ],
  [
    "Within noise",
    "The bar is missed, but drift, every window, the end, the trend and the scatter are like those of repeats of " +
      "one side, and the test has enough power.",
  ],
  [
    "Cannot tell",
    "Too few steps or repeats, or too much noise. It is neither a pass nor a failure. The reason states what is needed.",
  ],
  ["Found with 95 %", "The smallest drift and late collapse that the test finds in 95 of 100 such comparisons."],
  [
    "The chart",
    "Drag to zoom, double-click to show all steps, click an entry of the legend to hide a curve. The tooltip shows " +
      "logged values, also where the lines are smoothed.",
  ],
];

function meaning(root) {
  const digits = show(DATA.rounded_to, "count");
  const text = `This page stores its curves with ${digits} digits. The figures were computed from the full values.`;
  const rounding = DATA.rounded_to === null ? [] : [["Rounding", text]];
  root.append(el("dl.card.meaning", definitions([...MEANINGS, ...rounding])));
}

headline(document.getElementById("headline"));
const explorer = document.getElementById("explorer");
if (DATA.metrics.length === 0) explorer.remove();
metricTable(document.getElementById("table"), DATA.metrics.length === 0 ? null : makeExplorer(explorer).choose);
throughput(document.getElementById("throughput"));
environment(document.getElementById("environment"));
samples(document.getElementById("samples"));
meaning(document.getElementById("meaning"));
