// Axes and frames of a chart. A box says where the inside of a chart is: {left, right, top, bottom}.

function valueAxis(values, y, box, style) {
  return values.map((value) =>
    svg(
      "g",
      { class: "tick" },
      svg("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
      svg("text", { x: box.left - 10, y: y(value), dy: "0.32em", "text-anchor": "end" }, show(value, style)),
    ),
  );
}

function stepAxis(domain, x, box) {
  const room = Math.max(2, Math.floor((box.right - box.left) / 100));
  // One mark alone tells no distance: a finer division has two, which fit as well.
  const [whole] = [room, room + 1, room + 2]
    .map((wanted) => ticks(domain, wanted).filter(Number.isInteger))
    .sort((left, right) => Number(left.length < 2) - Number(right.length < 2));
  return whole.map((value) =>
    svg(
      "g",
      { class: "tick" },
      svg("line", { x1: x(value), x2: x(value), y1: box.top, y2: box.bottom, class: "upright" }),
      svg("text", { x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, show(value, "step")),
    ),
  );
}

function rectOf(box) {
  return {
    x: box.left,
    y: box.top,
    width: Math.max(1, box.right - box.left),
    height: Math.max(1, box.bottom - box.top),
  };
}

function clip(id, box) {
  return svg("clipPath", { id }, svg("rect", rectOf(box)));
}

/** The scale of values and the values to mark on it, for a range of values (null: nothing is known of it). */
function valueScale(span, log, [bottom, top], wanted = 5) {
  const known = span ?? (log ? [0.1, 1] : [0, 1]);
  const flat = known[0] === known[1];
  const [down, up] = flat ? [0.5, 2] : [0.92, 1.08];
  const range = log
    ? [Math.max(Number.MIN_VALUE, known[0] * down), Math.min(Number.MAX_VALUE, known[1] * up)]
    : padded(known, flat ? 0.5 : 0.06);
  const y = (log ? logarithmic : linear)(range, [bottom, top]);
  return { y, marked: log ? logTicks(range) : ticks(range, wanted) };
}

/** The same values, without those that a log scale cannot show. */
function positiveOnly(values) {
  return values.map((value) => (value > 0 ? value : NaN));
}
