// Curves, scales, axes and the pointer of a chart. Both pages draw with these functions.

function numbers(values) {
  return Float64Array.from(values, (value) => (value === null ? NaN : value));
}

const MAX_SMOOTHING = 100;

/** Half the window of the mean, in points: small steps at the slider's low end, a quarter of the curve at its end. */
function halfWindow(slider, points) {
  return Math.round((slider / MAX_SMOOTHING) ** 2 * (points / 8));
}

/** The mean over `half` points to each side, fewer at the ends. A trailing average would shift the curve. */
function smoothed(values, half) {
  if (half === 0) return values;
  const sums = new Float64Array(values.length + 1);
  const counts = new Float64Array(values.length + 1);
  values.forEach((value, i) => {
    const missing = Number.isNaN(value);
    sums[i + 1] = sums[i] + (missing ? 0 : value);
    counts[i + 1] = counts[i] + (missing ? 0 : 1);
  });
  return values.map((value, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const [from, to] = [i - reach, i + reach + 1];
    return Number.isNaN(value) ? NaN : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

/** The smallest and the largest value of several curves between two indices. */
function extent(curves, from, to) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of curves) {
    for (let i = from; i < to; i++) {
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
  }
  return low <= high ? [low, high] : null;
}

/** The first index whose step is not before `step`. */
function indexOfStep(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearestIndex(steps, step) {
  const after = Math.min(indexOfStep(steps, step), steps.length - 1);
  const before = Math.max(0, after - 1);
  return step - steps[before] < steps[after] - step ? before : after;
}

/**
 * The indices to draw: all of them if they fit, otherwise the first, lowest, highest and last point of each pixel
 * column and one index of each gap, which looks the same.
 */
function drawnIndices(values, { from, to, columns }) {
  const indices = [];
  if (columns === null) {
    for (let i = from; i < to; i++) indices.push(i);
    return indices;
  }
  let i = from;
  while (i < to) {
    const column = columns[i];
    let [first, low, high, last, gap] = [-1, -1, -1, -1, -1];
    for (; i < to && columns[i] === column; i++) {
      if (Number.isNaN(values[i])) {
        gap = i;
        continue;
      }
      if (first < 0) first = low = high = i;
      if (values[i] < values[low]) low = i;
      if (values[i] > values[high]) high = i;
      last = i;
    }
    let before = -1;
    for (const index of [first, low, high, last, gap].sort((left, right) => left - right)) {
      if (index > before) indices.push(index);
      before = index;
    }
  }
  return indices;
}

/** The pixel column of every index, or null if all points fit. */
function columnsOf(steps, x, from, to, width) {
  return to - from <= 2 * width ? null : Int32Array.from(steps, (step) => Math.floor(x(step)));
}

/** Round numbers that cover a range. */
function ticks([low, high], wanted) {
  const rough = high / wanted - low / wanted;
  if (!(rough > 0)) return [low];
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = unit * ([1, 2, 5].find((factor) => factor * unit >= rough) ?? 10);
  // The smallest numbers have no number between them.
  if (!(size > 0)) return [low];
  const first = Math.ceil(low / size - 1e-9);
  const values = [];
  // Counted: adding 1 to the largest integers changes nothing.
  for (let n = 0; n <= 4 * wanted && first + n <= high / size + 1e-9; n++) values.push((first + n) * size);
  return values;
}

/** Powers of ten, and 2 and 5 times them where there are few. */
function logTicks([low, high]) {
  const decades = Math.log10(high) - Math.log10(low);
  if (decades < 0.7) return ticks([low, high], 4);
  const factors = decades < 3 ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil(decades / 8));
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += stride) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) values.push(value);
    }
  }
  return values;
}

/** Computed with halves: the difference of the largest numbers overflows. */
function linear([low, high], [from, to]) {
  const half = high / 2 - low / 2;
  const scale = (value) => from + ((value / 2 - low / 2) / (half || 0.5)) * (to - from);
  scale.invert = (position) => low + ((position - from) / (to - from)) * half * 2;
  return scale;
}

function logarithmic([low, high], range) {
  const inner = linear([Math.log10(low), Math.log10(high)], range);
  return (value) => (value > 0 ? inner(Math.log10(value)) : NaN);
}

function padded([low, high], part) {
  const room = (high / 2 - low / 2) * (2 * part) || Math.abs(high) * part || 1;
  return [Math.max(-Number.MAX_VALUE, low - room), Math.min(Number.MAX_VALUE, high + room)];
}

/** Path data of a line. A missing value interrupts it; a single point is a dot. */
function linePath(values, frame) {
  let path = "";
  let length = 0;
  const end = () => (length === 1 ? "h0" : "");
  for (const i of frame.indices(values)) {
    const y = frame.y(values[i]);
    path += Number.isNaN(y) ? end() : `${length === 0 ? "M" : "L"}${frame.x(i).toFixed(1)} ${y.toFixed(1)}`;
    length = Number.isNaN(y) ? 0 : length + 1;
  }
  return path + end();
}

/** Path data of the area between two curves. */
function areaPath(low, high, frame) {
  const present = (values) => frame.indices(values).filter((i) => !Number.isNaN(values[i]));
  const [above, below] = [present(high), present(low).reverse()];
  if (above.length === 0 || below.length === 0) return "";
  const point = (values) => (i) => {
    const y = frame.y(values[i]);
    return `${frame.x(i).toFixed(1)} ${(Number.isNaN(y) ? frame.floor : y).toFixed(1)}`;
  };
  return `M${[...above.map(point(high)), ...below.map(point(low))].join("L")}Z`;
}

/** What `linePath` and `areaPath` need: the scales, and the indices to draw between `from` and `to`. */
function pathFrame({ x, from, to, columns }, steps, y, floor) {
  return { x: (i) => x(steps[i]), y, floor, indices: (values) => drawnIndices(values, { from, to, columns }) };
}

function valueAxis(values, y, box) {
  return values.map((value) =>
    svg(
      "g.tick",
      svg("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
      svg("text", { x: box.left - 10, y: y(value), dy: "0.32em", "text-anchor": "end" }, show(value, "tick")),
    ),
  );
}

function stepAxis(domain, x, box) {
  const room = Math.max(2, Math.floor((box.right - box.left) / 100));
  // A single tick shows no scale: prefer a finer division with two.
  const [integers] = [room, room + 1, room + 2]
    .map((wanted) => ticks(domain, wanted).filter(Number.isInteger))
    .sort((left, right) => Number(left.length < 2) - Number(right.length < 2));
  return integers.map((value) =>
    svg(
      "g.tick",
      svg("line.upright", { x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }),
      svg("text", { x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, show(value, "count")),
    ),
  );
}

function rectOf(box) {
  const [width, height] = [box.right - box.left, box.bottom - box.top];
  return { x: box.left, y: box.top, width: Math.max(1, width), height: Math.max(1, height) };
}

/** The value scale and its ticks, for a range of values (null: no values). */
function valueScale(span, log, [bottom, top], wanted = 5) {
  const shown = span ?? (log ? [0.1, 1] : [0, 1]);
  const flat = shown[0] === shown[1];
  const [down, up] = flat ? [0.5, 2] : [0.92, 1.08];
  const range = log
    ? [Math.max(Number.MIN_VALUE, shown[0] * down), Math.min(Number.MAX_VALUE, shown[1] * up)]
    : padded(shown, flat ? 0.5 : 0.06);
  const y = (log ? logarithmic : linear)(range, [bottom, top]);
  return { y, marked: log ? logTicks(range) : ticks(range, wanted) };
}

/** The values, with NaN for those that a log scale cannot show. */
function positiveOnly(values) {
  return values.map((value) => (value > 0 ? value : NaN));
}

/** The size and the step scale of a chart of the steps of `domain`, at least `minWidth` wide. */
function layChart(root, minWidth, height, margin, domain) {
  const width = Math.max(minWidth, root.clientWidth);
  const box = { left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
  const spread = domain[0] === domain[1] ? padded(domain, 0.02) : domain;
  return { width, height, box, domain, spread, x: linear(spread, [box.left, box.right]) };
}

/** Draws a chart: the step axis, `content`, and the parts that `followPointer` uses. `clips` has clip areas by id. */
function drawChart(root, chart, label, clips, content, kind = "chart") {
  const { width, height, box, domain, spread, x } = chart;
  chart.picture = svg(
    "svg",
    { class: kind, width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    svg("defs", Object.entries(clips).map(([id, area]) => svg("clipPath", { id }, svg("rect", rectOf(area))))),
    stepAxis(spread, x, box),
    content,
    svg("g.crosshair"),
    svg("rect.drag", { y: box.top, height: box.bottom - box.top, width: 0 }),
    svg("rect.catcher", rectOf(box)),
  );
  Object.assign(chart.picture.dataset, { first: domain[0], last: domain[1] });
  root.replaceChildren(chart.picture);
  return chart;
}

/** Shows a vertical line with dots at the x position `at`, and the tooltip on the side with more room. */
function showCrosshair(chart, at, dots, tooltip, content) {
  const line = svg("line", { x1: at, x2: at, y1: chart.box.top, y2: chart.box.bottom });
  chart.picture.querySelector(".crosshair").replaceChildren(line, ...dots);
  tooltip.replaceChildren(...content);
  tooltip.hidden = false;
  const left = at > chart.width / 2 ? at - tooltip.offsetWidth - 14 : at + 14;
  tooltip.style.left = `${Math.max(0, Math.min(left, chart.width - tooltip.offsetWidth))}px`;
}

function hideCrosshair(chart, tooltip) {
  tooltip.hidden = true;
  chart?.picture.querySelector(".crosshair").replaceChildren();
}

/** A value in a tooltip, with its full precision. */
const hoverValue = (name, value, style = "precise") =>
  el("span", { "data-hover": name, "data-value": String(value) }, show(value, style));

/**
 * `hover` receives the x position of the pointer; `leave` is called when it leaves; `zoom` receives the two steps of a
 * drag, or null to show all steps.
 */
function followPointer({ picture, box, x }, { hover, leave, zoom }) {
  const catcher = picture.querySelector(".catcher");
  const drag = picture.querySelector(".drag");
  let start = null;
  const position = (event) => event.clientX - picture.getBoundingClientRect().left;
  const sorted = (event) => [start, position(event)].sort((one, other) => one - other);
  catcher.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = position(event);
    catcher.setPointerCapture(event.pointerId);
  });
  catcher.addEventListener("pointermove", (event) => {
    hover(position(event));
    if (start === null) return;
    const [left, right] = sorted(event);
    drag.setAttribute("x", Math.max(left, box.left));
    drag.setAttribute("width", Math.max(0, Math.min(right, box.right) - Math.max(left, box.left)));
  });
  catcher.addEventListener("pointerup", (event) => {
    const edges = start === null ? null : sorted(event);
    start = null;
    drag.setAttribute("width", 0);
    if (edges !== null && edges[1] - edges[0] >= 6) zoom(edges.map((edge) => x.invert(edge)));
  });
  catcher.addEventListener("pointerleave", leave);
  catcher.addEventListener("dblclick", () => zoom(null));
}

/** The smoothing slider. `half` returns half its window for a curve of so many points, and shows the window. */
function smoothingSlider(unit, changed) {
  const output = el("output", { for: "smooth" }, "off");
  const attributes = { type: "range", id: "smooth", min: 0, max: MAX_SMOOTHING, value: 0, oninput: changed };
  const input = el("input", attributes);
  const half = (points) => {
    const size = halfWindow(Number(input.value), points);
    output.textContent = size === 0 ? "off" : `${show(2 * size + 1, "count")} ${unit}`;
    return size;
  };
  return { label: el("label.slider", "Smooth ", input, output), half };
}

const resetButton = (onclick) =>
  el("button", { type: "button", id: "reset", hidden: true, onclick }, "Show all steps");

/** Draws again when the width of the plot changes. `chart()` returns what is drawn now, or null. */
function onResize(plot, minWidth, chart, draw) {
  new ResizeObserver(() => {
    if (chart() !== null && plot.clientWidth >= minWidth && plot.clientWidth !== chart().width) draw();
  }).observe(plot);
}
