// The data of the page, its figures and its signs.

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
