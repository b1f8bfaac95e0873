// The chart of one metric of several runs.

const EDGE = { left: 58, right: 14, top: 10, bottom: 26 };
let charts = 0;

/** A curve as arrays: its points, and a gap (NaN) for each NaN or infinite value in the log. */
function curveOf(run, told) {
  const points = told.steps.map((step, i) => [step, told.values[i]]);
  for (const [step] of told.odd.first) points.push([step, NaN]);
  points.sort((one, other) => one[0] - other[0]);
  return {
    run,
    slot: slotOf(run),
    steps: Float64Array.from(points, (point) => point[0]),
    values: Float64Array.from(points, (point) => point[1]),
    mean: told.mean ? { steps: Float64Array.from(told.mean.steps), values: numbers(told.mean.values) } : null,
    odd: told.odd,
  };
}

/** Draws `curves` between the steps of `domain`; returns the drawing for `followPointer`. */
function drawMetric(root, name, curves, domain, settings) {
  const width = Math.max(260, root.clientWidth);
  const height = settings.height;
  const box = { left: EDGE.left, right: width - EDGE.right, top: EDGE.top, bottom: height - EDGE.bottom };
  const spread = domain[0] === domain[1] ? padded(domain, 0.02) : domain;
  const x = linear(spread, [box.left, box.right]);
  const wanted = height > 250 ? 7 : 4;
  const { y, marked } = valueScale(spanOf(curves, settings.log), settings.log, [box.bottom, box.top], wanted);
  const id = `clip-${(charts += 1)}`;
  const label = `${name}: ${curves.map((curve) => curve.run).join(", ")}`;
  const picture = chartPicture(width, height, domain, label);
  const inside = svg("g", { "clip-path": `url(#${id})` });
  for (const curve of [...curves].reverse()) inside.append(...pathsOf(curve, x, y, box));
  picture.append(
    svg("defs", {}, clip(id, box)),
    ...stepAxis(spread, x, box),
    ...valueAxis(marked, y, box, "tick"),
    inside,
    ...curves.flatMap((curve) => oddMarks(curve, x, domain, box)),
    ...pointerParts(box),
  );
  root.replaceChildren(picture);
  return { picture, x, y, box, domain, width, curves };
}

function spanOf(curves, log) {
  const shown = (values) => (log ? positiveOnly(values) : values);
  const spans = curves
    .flatMap((curve) => [curve, ...(curve.mean ? [curve.mean] : [])])
    .map((one) => extent([shown(one.values)], 0, one.values.length))
    .filter((span) => span !== null);
  return spans.length === 0
    ? null
    : [Math.min(...spans.map((span) => span[0])), Math.max(...spans.map((span) => span[1]))];
}

function pathsOf(curve, x, y, box) {
  const path = (one, kind) => {
    const state = { x, from: 0, to: one.values.length, columns: null };
    const frame = frameOf(state, one.steps, y, box.bottom);
    return svg("path", { class: `curve s${curve.slot}${kind}`, "data-run": curve.run, d: linePath(one.values, frame) });
  };
  return curve.mean ? [path(curve, " raw"), path(curve.mean, "")] : [path(curve, "")];
}

/** Marks at the upper edge for NaN and infinite values. */
function oddMarks(curve, x, domain, box) {
  return curve.odd.first
    .filter(([step]) => step >= domain[0] && step <= domain[1])
    .map(([step, value]) =>
      svg(
        "path",
        { class: `odd s${curve.slot}`, d: `M${x(step)} ${box.top + 7}l4 -7h-8z` },
        svg("title", {}, `${value} at step ${show(step, "step")}`),
      ),
    );
}

/** The step of any curve that is nearest to `step`. */
function nearestStep(curves, step) {
  let best = null;
  for (const curve of curves) {
    if (curve.steps.length === 0) continue;
    const found = curve.steps[nearestPlace(curve.steps, step)];
    if (best === null || Math.abs(found - step) < Math.abs(best - step)) best = found;
  }
  return best;
}

/** The point of each curve that is nearest to a step. */
function pointsAt(curves, step) {
  return curves
    .filter((curve) => curve.steps.length > 0)
    .map((curve) => {
      const place = nearestPlace(curve.steps, step);
      return { curve, step: curve.steps[place], value: curve.values[place] };
    });
}

/** The name of a run; its path if another shown run has the same name. */
function shortName(run, points) {
  const name = runName(run);
  return points.filter((point) => runName(point.curve.run) === name).length > 1 ? run : name;
}

function showStep(drawing, tooltip, step) {
  const points = pointsAt(drawing.curves, step);
  const at = drawing.x(step);
  const dots = points
    .filter((point) => !Number.isNaN(drawing.y(point.value)))
    .map(
      (point) => svg(
        "circle",
        { class: `s${point.curve.slot}`, cx: drawing.x(point.step), cy: drawing.y(point.value), r: 3.5 },
      ),
    );
  showCrosshair(drawing, at, dots, tooltip, [
    el("div", { class: "tooltip-step", "data-value": step }, "step ", show(step, "step")),
    el(
      "div",
      { class: "tooltip-grid" },
      points.map((point) => [
        el("span", { class: "key" }, swatch(point.curve.run), visible(shortName(point.curve.run, points))),
        el(
          "span",
          { "data-hover": point.curve.run, "data-value": String(point.value) },
          show(point.value, "precise"),
          point.step === step ? "" : el("small", {}, ` step ${show(point.step, "step")}`),
        ),
      ]),
    ),
  ]);
}
