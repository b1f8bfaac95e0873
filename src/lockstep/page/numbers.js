// The one way a number is written.

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

/** A number as the reader sees it: every number of the page is written here. */
function show(value, style = "number") {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  return STYLES[style](value).replaceAll("-", "−");
}
