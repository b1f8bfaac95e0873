// Elements, and names in them. Text is always text, never markup.

/** An element with attributes and children; a child that is a string becomes text. */
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

/** The name of a metric, which may break after a slash and nowhere else if that is enough. */
function metricName(name) {
  return el(
    "code",
    {},
    visible(name)
      .split(/(?<=\/)/)
      .map((part, i) => (i === 0 ? part : [el("wbr"), part])),
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

// Control characters, marks of the writing direction, separators, and halves of surrogate pairs, which are none.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff]" +
    "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);

/** Text with its hidden characters spelt out, as the console spells them: control characters, writing directions. */
function visible(text) {
  return text.replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0);
    return code < 32 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}
