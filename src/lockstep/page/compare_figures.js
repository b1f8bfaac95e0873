// The data of the report: figures, verdicts, and the two curves of a metric.

const DATA = JSON.parse(document.getElementById("comparison").textContent);

function lookup(path) {
  return path.split(".").reduce((value, key) => value[key], DATA);
}

/** A number of the data, with its address and its full precision. */
function figure(path, style = "number") {
  const value = lookup(path);
  const kind = value === null ? "figure missing" : "figure";
  return el("span", { class: kind, "data-path": path, "data-value": String(value) }, show(value, style));
}

const VERDICTS = {
  "in step": { sign: "✓", tone: "good" },
  "within noise": { sign: "≈", tone: "noise" },
  "cannot tell": { sign: "?", tone: "open" },
  "out of step": { sign: "✕", tone: "bad" },
  "not comparable": { sign: "?", tone: "open" },
};

function badge(verdict, large = false) {
  if (verdict === null) return el("span", { class: "badge quiet" }, "not judged");
  const { sign, tone } = VERDICTS[verdict];
  return el(
    "span",
    { class: `badge ${tone}${large ? " large" : ""}` },
    el("b", { "aria-hidden": "true" }, sign),
    verdict,
  );
}

/** The letter of a side, in its colour. */
function side(letter) {
  return el("span", { class: `side ${letter}`, "aria-label": `side ${letter.toUpperCase()}` }, letter.toUpperCase());
}

function seriesOf(metric) {
  const a = numbers(metric.a);
  const b = numbers(metric.b);
  return { steps: Float64Array.from(DATA.steps[metric.steps]), a, b, repeats: metric.repeats.map(numbers) };
}

/** How far b may lie from a at each step; null for a metric without a bar. */
function toleranceOf(metric, a) {
  if (metric.bar_percent === null) return null;
  const part = metric.bar_percent / 100;
  return a.map((value) => (decidedByScaled(metric) ? part * Math.abs(value) : part));
}

/** The bar belongs to the absolute error unless the judge says that the scaled one decides. */
function decidedByScaled(metric) {
  return metric.scaled;
}

function minus(left, right) {
  return left.map((value, i) => value - right[i]);
}

function plus(left, right, sign = 1) {
  return left.map((value, i) => value + sign * right[i]);
}
