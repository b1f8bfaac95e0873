// HTML and SVG elements, tables, names and numbers. Text is always inserted as text, never as markup.

/**
 * An element, such as `el("div.card", { id: "a", onclick: open }, "text", child)`. The attributes are optional. A
 * function is an event listener; null, undefined and false leave the attribute out. Children may be nested lists.
 */
function el(tag, ...parts) {
  return fill((name) => document.createElement(name), tag, parts);
}

function svg(tag, ...parts) {
  return fill((name) => document.createElementNS("http://www.w3.org/2000/svg", name), tag, parts);
}

const given = (value) => value !== null && value !== undefined && value !== false;

function fill(create, tag, parts) {
  const [name, ...classes] = tag.split(".");
  const element = create(name);
  if (classes.length > 0) element.setAttribute("class", classes.join(" "));
  const attributes = parts[0]?.constructor === Object ? parts.shift() : {};
  for (const [key, value] of Object.entries(attributes).filter(([, value]) => given(value))) {
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...parts.flat(Infinity).filter(given));
  return element;
}

/** A card with a table: names or `th` elements as head (null: no head), `tr` elements as rows. */
function tableCard(kind, head, rows, caption = null) {
  const column = (name) => (name instanceof Node ? name : el("th", { scope: "col" }, name));
  const columns = head === null ? null : el("thead", el("tr", head.map(column)));
  return el("div.card.flush", el("div.scroll", el("table", { class: kind }, caption, columns, el("tbody", rows))));
}

/** The badge of a setup difference by its weight: the effect that it may have on curves. */
const WEIGHTS = { blocks: "bad", matters: "noise", harmless: "quiet" };
const weightBadge = (weight) => el(`span.badge.${WEIGHTS[weight]}`, weight);

const definitions = (rows) => rows.map(([name, ...text]) => el("div", el("dt", name), el("dd", text)));

/** The name of a metric; line breaks are allowed after a slash. */
function metricName(name) {
  const parts = visible(name).split(/(?<=\/)/);
  return el("code", parts.map((part, i) => (i === 0 ? part : [el("wbr"), part])));
}

/** The name of a run: the last part of its path. */
function runName(source) {
  return source.replace(/[\\/]+$/, "").split(/[\\/]/).pop() || source;
}

// Control characters, writing direction marks, separators and lone surrogates.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff]" +
    "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);

/** Text with its hidden characters escaped, as on the console. */
function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.charCodeAt(0);
    return code < 32 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

const MISSING = "–";

function grouped(text) {
  const [integer, ...rest] = text.split(".");
  return [integer.replace(/\B(?=(\d{3})+$)/g, ","), ...rest].join(".");
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
  ratio: (value) => `${value.toFixed(value < 0.095 ? 4 : 3)} ×`,
  plain: (value) => (value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential() : String(value)),
  tick: (value) =>
    (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6) || value === 0
      ? grouped(String(Number(value.toPrecision(6))))
      : String(Number(value.toPrecision(4))).replace("e+", "e"),
};

/** The text of a number. All numbers of the pages are formatted here; steps are counts. */
function show(value, style = "number") {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  return STYLES[style](value).replaceAll("-", "−");
}

const plural = (number, noun) => `${show(number, "count")} ${noun}${number === 1 ? "" : "s"}`;
