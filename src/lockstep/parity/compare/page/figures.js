// The data of the page, elements, and the one way a number is written.

const DATA = JSON.parse(document.getElementById("comparison").textContent);
const MISSING = "–";

/** An element with attributes and children; text is always text, never markup. */
function el(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function furnish(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function grouped(text) {
  const [whole, ...rest] = text.split(".");
  return [whole.replace(/\B(?=(\d{3})+$)/g, ","), ...rest].join(".");
}

function significant(value, digits) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4 || size >= 1e9) return value.toExponential(Math.min(digits - 1, 2)).replace("e+", "e");
  return grouped(size >= 10 ** digits ? value.toFixed(0) : value.toPrecision(digits));
}

const STYLES = {
  number: (value) => significant(value, 4),
  precise: (value) => significant(value, 6),
  signed: (value) => (value > 0 ? "+" : "") + significant(value, 3),
  percent: (value) => `${significant(value, 3)} %`,
  bar: (value) => `${Number(value.toPrecision(6))} %`,
  percents: (value) => `${value > 0 ? "+" : ""}${significant(value, 3)} %`,
  count: (value) => grouped(String(value)),
  step: (value) => grouped(String(value)),
  rate: (value) => significant(value, 4),
  ratio: (value) => `${value.toFixed(value < 0.095 ? 4 : 3)} ×`,
  plain: (value) => (value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential() : String(value)),
  tick: (value) =>
    (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6) || value === 0
      ? grouped(String(Number(value.toPrecision(6))))
      : String(Number(value.toPrecision(4))).replace("e+", "e"),
};

/** A number as the reader sees it: every number of the page is written here. */
function show(value, style = "number") {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  return STYLES[style](value).replaceAll("-", "−");
}

function lookup(path) {
  return path.split(".").reduce((value, key) => value[key], DATA);
}

/** A number of the data, with its address and its full precision. */
function figure(path, style = "number") {
  const value = lookup(path);
  const kind = value === null ? "figure missing" : "figure";
  return el("span", { class: kind, "data-path": path, "data-value": String(value) }, show(value, style));
}

/** The name of a metric, which may break after a slash and nowhere else if that is enough. */
function metricName(name) {
  return el(
    "code",
    {},
    name.split(/(?<=\/)/).map((part, i) => (i === 0 ? part : [el("wbr"), part])),
  );
}

/** The last part of a path, which is the name of a run. */
function runName(source) {
  return (
    source
      .replace(/[\\/]+$/, "")
      .split(/[\\/]/)
      .pop() || source
  );
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
