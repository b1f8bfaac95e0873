// The chart of one metric of two runs: curves with their bands above, the difference with its tolerance below.

const MARGIN = { left: 66, right: 28, top: 12, bottom: 30 };
const HEIGHT = { curves: 300, gap: 34, strip: 120 };

function upright(x, top, bottom, kind, label, flip) {
  return svg(
    "g",
    { class: kind },
    svg("line", { x1: x, x2: x, y1: top, y2: bottom }),
    svg("text", { x: flip ? x - 6 : x + 6, y: top + 12, "text-anchor": flip ? "end" : "start" }, label),
  );
}

/** The curves of a metric as they are drawn with the settings. */
function shownCurves(metric, series, settings) {
  const a = smoothed(series.a, settings.half);
  const b = smoothed(series.b, settings.half);
  const tolerance = toleranceOf(metric, a);
  return {
    a,
    b,
    tolerance,
    repeats: series.repeats.map((repeat) => smoothed(repeat, settings.half)),
    difference: minus(b, a),
    noise: metric.noise === null ? null : a.map(() => metric.noise.mean_error_percent / 100),
  };
}

function drawChart(root, metric, series, settings) {
  const width = Math.max(320, root.clientWidth);
  const { steps } = series;
  const domain = settings.view ?? [steps[0], steps[steps.length - 1]];
  const spread = domain[0] === domain[1] ? padded(domain, 0.02) : domain;
  const bottom = MARGIN.top + HEIGHT.curves;
  const stripTop = bottom + HEIGHT.gap;
  const stripBottom = stripTop + HEIGHT.strip;
  const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: stripBottom };
  const upper = { ...box, bottom };
  const lower = { ...box, top: stripTop };
  const x = linear(spread, [box.left, box.right]);
  // One point beyond each edge, so that lines reach the edges.
  const from = Math.max(0, placeOf(steps, domain[0]) - 1);
  const to = Math.min(steps.length, placeOf(steps, domain[1] + 1e-9) + 1);
  const curves = shownCurves(metric, series, settings);
  const state = { x, from, to, width, columns: columnsOf(steps, x, from, to, width) };
  const label = `${metric.name}: both curves and their difference`;
  const kind = state.columns === null ? "chart" : "chart dense";
  const picture = chartPicture(width, stripBottom + MARGIN.bottom, domain, label, kind);
  picture.append(
    svg("defs", {}, clip("clip-curves", upper), clip("clip-strip", lower)),
    ...stepAxis(spread, x, box),
    ...drawCurves(series, curves, settings, state, upper),
    ...drawStrip(metric, series, curves, settings, state, lower),
    ...marks(metric, x, domain, stripBottom, width),
    svg("text", { class: "axis-name", x: MARGIN.left - 10, y: stripBottom + 18, "text-anchor": "end" }, "step"),
    ...pointerParts(box),
  );
  root.replaceChildren(picture);
  return { picture, x, domain, box, yOf: state.yOf, width };
}

function drawCurves(series, curves, settings, state, box) {
  const { from, to } = state;
  const seen = ["a", "b"].filter((letter) => !settings.hidden.has(letter)).map((letter) => curves[letter]);
  const span = extent(settings.log ? seen.map(positiveOnly) : seen, from, to);
  const { y, marked } = valueScale(span, settings.log, [box.bottom, box.top]);
  state.yOf = y;
  const frame = frameOf(state, series.steps, y, box.bottom);
  const inside = svg("g", { "clip-path": "url(#clip-curves)" });
  const band = (half, kind) =>
    half !== null &&
    !settings.hidden.has(kind) &&
    inside.append(svg("path", { class: kind, d: areaPath(plus(curves.a, half, -1), plus(curves.a, half), frame) }));
  band(curves.tolerance, "bar-band");
  band(curves.noise, "noise-band");
  if (!settings.hidden.has("repeats")) {
    for (const repeat of curves.repeats)
      inside.append(svg("path", { class: "curve repeat", d: linePath(repeat, frame) }));
  }
  for (const letter of ["a", "b"].filter((one) => !settings.hidden.has(one))) {
    if (settings.half > 0)
      inside.append(svg("path", { class: `curve raw ${letter}`, d: linePath(series[letter], frame) }));
    inside.append(svg("path", { class: `curve ${letter}`, "data-curve": letter, d: linePath(curves[letter], frame) }));
  }
  return [...valueAxis(marked, y, box, "tick"), inside];
}

function drawStrip(metric, series, curves, settings, state, box) {
  const { from, to } = state;
  const { top, bottom } = box;
  const beyond = curves.difference.map((value, i) =>
    curves.tolerance !== null && Math.abs(value) > curves.tolerance[i] ? value : 0,
  );
  const measured = [curves.difference, ...(curves.tolerance !== null && !settings.fit ? [curves.tolerance] : [])];
  const span = extent(measured, from, to) ?? [0, 0];
  const reach = Math.max(Math.abs(span[0]), Math.abs(span[1])) * 1.15 || 1;
  const y = linear([-reach, reach], [bottom, top]);
  const frame = frameOf(state, series.steps, y, bottom);
  const zero = curves.difference.map((value) => (Number.isNaN(value) ? NaN : 0));
  const positive = (values) => values.map((value) => (value > 0 ? value : Number.isNaN(value) ? NaN : 0));
  const negative = (values) => values.map((value) => (value < 0 ? value : Number.isNaN(value) ? NaN : 0));
  const inside = svg("g", { "clip-path": "url(#clip-strip)" });
  if (curves.noise !== null && !settings.hidden.has("noise-band")) {
    inside.append(
      svg("path", {
        class: "noise-band",
        d: areaPath(
          curves.noise.map((value) => -value),
          curves.noise,
          frame,
        ),
      }),
    );
  }
  for (const [values, kind] of [
    [curves.difference, "difference"],
    [beyond, "difference beyond"],
  ]) {
    inside.append(
      svg("path", {
        class: kind,
        d: areaPath(zero, positive(values), frame) + areaPath(negative(values), zero, frame),
      }),
    );
  }
  inside.append(
    svg("path", { class: "curve difference-line", "data-curve": "difference", d: linePath(curves.difference, frame) }),
  );
  if (curves.tolerance !== null) {
    for (const sign of [1, -1]) {
      inside.append(
        svg("path", {
          class: "curve bar-line",
          "data-curve": "bar",
          d: linePath(
            curves.tolerance.map((value) => sign * value),
            frame,
          ),
        }),
      );
    }
  }
  const title = svg(
    "text",
    { class: "axis-name", x: MARGIN.left, y: top - 10 },
    "difference B − A",
    curves.tolerance === null
      ? ""
      : `, bar ± ${show(metric.bar_percent, "bar")} ${decidedByScaled(metric) ? "of |A|" : "absolute"}`,
  );
  return [...valueAxis(ticks([-reach, reach], 4), y, box, "tick"), title, inside];
}

function marks(metric, x, domain, bottom, width) {
  const { parted_at: parted, worst_step: worst } = metric.figures;
  const visible = (step) => step !== null && step >= domain[0] && step <= domain[1];
  const flip = (step) => x(step) > width - 150;
  return [
    visible(parted)
      ? upright(x(parted), MARGIN.top, bottom, "mark parted", `parted at ${show(parted, "step")}`, flip(parted))
      : null,
    visible(worst)
      ? svg(
          "path",
          { class: "mark worst", d: `M${x(worst)} ${bottom - 10}l5 9h-10z` },
          svg("title", {}, `worst step ${show(worst, "step")}`),
        )
      : null,
  ].filter((mark) => mark !== null);
}
