// The drawing of one metric: curves with their bands above, the difference with its bar below. Returns the scales.

const MARGIN = { left: 66, right: 28, top: 12, bottom: 30 };
const HEIGHT = { curves: 300, gap: 34, strip: 120 };

function valueAxis(values, y, width, style) {
  return values.map((value) =>
    svg(
      "g",
      { class: "tick" },
      svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      svg("text", { x: MARGIN.left - 10, y: y(value), dy: "0.32em", "text-anchor": "end" }, show(value, style)),
    ),
  );
}

function stepAxis(domain, x, top, bottom, width) {
  const whole = ticks(domain, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger);
  return whole.map((value) =>
    svg(
      "g",
      { class: "tick" },
      svg("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, class: "upright" }),
      svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, show(value, "step")),
    ),
  );
}

function clip(id, top, height, width) {
  const box = { x: MARGIN.left, y: top, width: Math.max(1, width - MARGIN.left - MARGIN.right), height };
  return svg("clipPath", { id }, svg("rect", box));
}

function upright(x, top, bottom, kind, label, flip) {
  return svg(
    "g",
    { class: kind },
    svg("line", { x1: x, x2: x, y1: top, y2: bottom }),
    svg("text", { x: flip ? x - 6 : x + 6, y: top + 12, "text-anchor": flip ? "end" : "start" }, label),
  );
}

/** What the chart shows of a metric under the reader's settings: the curves as they will be drawn. */
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
  const x = linear(spread, [MARGIN.left, width - MARGIN.right]);
  // One point beyond each edge, so that lines run out of the picture instead of ending in it.
  const from = Math.max(0, placeOf(steps, domain[0]) - 1);
  const to = Math.min(steps.length, placeOf(steps, domain[1] + 1e-9) + 1);
  const curves = shownCurves(metric, series, settings);
  const state = { x, from, to, width, columns: columnsOf(steps, x, from, to, width) };
  const bottom = MARGIN.top + HEIGHT.curves;
  const stripTop = bottom + HEIGHT.gap;
  const stripBottom = stripTop + HEIGHT.strip;
  const picture = svg("svg", {
    class: state.columns === null ? "chart" : "chart dense",
    width,
    height: stripBottom + MARGIN.bottom,
    viewBox: `0 0 ${width} ${stripBottom + MARGIN.bottom}`,
    role: "img",
    "data-first": domain[0],
    "data-last": domain[1],
    "aria-label": `${metric.name}: both curves and their difference`,
  });
  picture.append(
    svg(
      "defs",
      {},
      clip("clip-curves", MARGIN.top, HEIGHT.curves, width),
      clip("clip-strip", stripTop, HEIGHT.strip, width),
    ),
    ...stepAxis(spread, x, MARGIN.top, stripBottom, width),
    ...drawCurves(series, curves, settings, state, bottom),
    ...drawStrip(metric, series, curves, settings, state, stripTop, stripBottom),
    ...marks(metric, x, domain, stripBottom, width),
    svg("text", { class: "axis-name", x: MARGIN.left - 10, y: stripBottom + 18, "text-anchor": "end" }, "step"),
    svg("g", { class: "crosshair" }),
    svg("rect", { class: "drag", y: MARGIN.top, height: stripBottom - MARGIN.top, width: 0 }),
    svg("rect", {
      class: "catcher",
      x: MARGIN.left,
      y: MARGIN.top,
      width: Math.max(1, width - MARGIN.left - MARGIN.right),
      height: stripBottom - MARGIN.top,
    }),
  );
  root.replaceChildren(picture);
  return { picture, x, domain, top: MARGIN.top, bottom: stripBottom, yOf: state.yOf, width };
}

function drawCurves(series, curves, settings, state, bottom) {
  const { from, to, width } = state;
  const seen = ["a", "b"].filter((letter) => !settings.hidden.has(letter)).map((letter) => curves[letter]);
  const positive = (values) => values.map((value) => (value > 0 ? value : NaN));
  const measured = settings.log ? seen.map(positive) : seen;
  const span = extent(measured, from, to) ?? (settings.log ? [0.1, 1] : [0, 1]);
  const flat = span[0] === span[1];
  const range =
    settings.log && !flat
      ? [span[0] * 0.92, span[1] * 1.08]
      : settings.log
        ? [span[0] / 2, span[0] * 2]
        : padded(span, flat ? 0.5 : 0.06);
  const y = (settings.log ? logarithmic : linear)(range, [bottom, MARGIN.top]);
  state.yOf = y;
  const frame = frameOf(state, series.steps, y, bottom);
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
  const marked = settings.log ? logTicks(range) : ticks(range, 5);
  return [...valueAxis(marked, y, width, "tick"), inside];
}

function drawStrip(metric, series, curves, settings, state, top, bottom) {
  const { from, to, width } = state;
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
  return [...valueAxis(ticks([-reach, reach], 4), y, width, "tick"), title, inside];
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
