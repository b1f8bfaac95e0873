// HTML and SVG elements, names and numbers. Text is always inserted as text, never as markup.

/** An element with attributes and children; a child that is a string becomes text. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** The name of a metric; line breaks are allowed after a slash. */
function metricName(name) {
  return el(
    "code",
    {},
    visible(name)
      .split(/(?<=\/)/)
      .map((part, i) => (i === 0 ? part : [el("wbr"), part])),
  );
}

/** The name of a run: the last part of its path. */
function runName(source) {
  return (
    source
      .replace(/[\\/]+$/, "")
      .split(/[\\/]/)
      .pop() || source
  );
}

// Control characters, writing direction marks, separators and lone surrogates.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff]" +
    "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);

/** Text with its hidden characters escaped, as on the console. */
function visible(text) {
  return text.replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0);
    return code < 32 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

const MISSING = "–";

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

/** The text of a number. All numbers of the pages are formatted here. */
function show(value, style = "number") {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  return STYLES[style](value).replaceAll("-", "−");
}
