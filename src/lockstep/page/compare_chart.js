// The chart of one metric of two runs, with its controls: both curves and their bands above, their difference below.

const DATA = JSON.parse(document.getElementById("comparison").textContent);
const MARGIN = { left: 66, right: 28, top: 12, bottom: 30 };
const HEIGHT = { curves: 300, gap: 34, strip: 120 };

/** A number of the data, with its path and its full precision. */
function figure(path, style = "number") {
  const value = path.split(".").reduce((part, key) => part[key], DATA);
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
  if (verdict === null) return el("span.badge.quiet", "not judged");
  const { sign, tone } = VERDICTS[verdict];
  return el(`span.badge.${tone}${large ? ".large" : ""}`, el("b", { "aria-hidden": "true" }, sign), verdict);
}

/** The letter of a side, in its color. */
function side(letter) {
  return el(`span.side.${letter}`, { "aria-label": `side ${letter.toUpperCase()}` }, letter.toUpperCase());
}

function seriesOf(metric) {
  const steps = Float64Array.from(DATA.steps[metric.steps]);
  return { steps, a: numbers(metric.a), b: numbers(metric.b), repeats: metric.repeats.map(numbers) };
}

/** The curves of a metric as they are drawn with the settings. `tolerance` is null for a metric without a bar. */
function shownCurves(metric, series, settings) {
  const [a, b] = [series.a, series.b].map((values) => smoothed(values, settings.half));
  const part = metric.bar_percent / 100;
  return {
    a,
    b,
    tolerance: metric.bar_percent === null ? null : a.map((value) => (metric.scaled ? part * Math.abs(value) : part)),
    repeats: series.repeats.map((repeat) => smoothed(repeat, settings.half)),
    difference: b.map((value, i) => value - a[i]),
    noise: metric.noise === null ? null : a.map(() => metric.noise.mean_error_percent / 100),
  };
}

function drawComparison(root, metric, series, settings) {
  const { steps } = series;
  const domain = settings.view ?? [steps[0], steps[steps.length - 1]];
  const bottom = MARGIN.top + HEIGHT.curves;
  const height = bottom + HEIGHT.gap + HEIGHT.strip + MARGIN.bottom;
  const chart = layChart(root, 320, height, MARGIN, domain);
  const { box, x, width } = chart;
  const upper = { ...box, bottom };
  const lower = { ...box, top: bottom + HEIGHT.gap };
  // One point beyond each edge, so that lines reach the edges.
  const from = Math.max(0, indexOfStep(steps, domain[0]) - 1);
  const to = Math.min(steps.length, indexOfStep(steps, domain[1] + 1e-9) + 1);
  const curves = shownCurves(metric, series, settings);
  const range = { x, from, to, columns: columnsOf(steps, x, from, to, width) };
  const content = [
    drawCurves(chart, series, curves, settings, range, upper),
    drawStrip(metric, series, curves, settings, range, lower),
    marks(metric, chart),
    svg("text.axis-name", { x: MARGIN.left - 10, y: box.bottom + 18, "text-anchor": "end" }, "step"),
  ];
  const label = `${metric.name}: both curves and their difference`;
  const kind = range.columns === null ? "chart" : "chart dense";
  return drawChart(root, chart, label, { "clip-curves": upper, "clip-strip": lower }, content, kind);
}

const pathOf = (kind, d, curve = null) => svg("path", { class: kind, "data-curve": curve, d });

function drawCurves(chart, series, curves, settings, range, box) {
  const letters = ["a", "b"].filter((letter) => !settings.hidden.has(letter));
  const seen = letters.map((letter) => (settings.log ? positiveOnly(curves[letter]) : curves[letter]));
  const { y, marked } = valueScale(extent(seen, range.from, range.to), settings.log, [box.bottom, box.top]);
  chart.y = y;
  const frame = pathFrame(range, series.steps, y, box.bottom);
  const aPlus = (half, sign) => curves.a.map((value, i) => value + sign * half[i]);
  const band = (half, kind) =>
    half !== null && !settings.hidden.has(kind) && pathOf(kind, areaPath(aPlus(half, -1), aPlus(half, 1), frame));
  const repeats = settings.hidden.has("repeats") ? [] : curves.repeats;
  const lines = letters.map((letter) => [
    settings.half > 0 && pathOf(`curve raw ${letter}`, linePath(series[letter], frame)),
    pathOf(`curve ${letter}`, linePath(curves[letter], frame), letter),
  ]);
  return [
    valueAxis(marked, y, box),
    svg(
      "g",
      { "clip-path": "url(#clip-curves)" },
      band(curves.tolerance, "bar-band"),
      band(curves.noise, "noise-band"),
      repeats.map((repeat) => pathOf("curve repeat", linePath(repeat, frame))),
      lines,
    ),
  ];
}

function drawStrip(metric, series, curves, settings, range, box) {
  const { difference, tolerance, noise } = curves;
  const beyond = difference.map((value, i) => (tolerance !== null && Math.abs(value) > tolerance[i] ? value : 0));
  const measured = [difference, ...(tolerance !== null && !settings.fit ? [tolerance] : [])];
  const span = extent(measured, range.from, range.to) ?? [0, 0];
  const reach = Math.max(Math.abs(span[0]), Math.abs(span[1])) * 1.15 || 1;
  const y = linear([-reach, reach], [box.bottom, box.top]);
  const frame = pathFrame(range, series.steps, y, box.bottom);
  const clamp = (values, keep) => values.map((value) => (keep(value) || Number.isNaN(value) ? value : 0));
  const zero = clamp(difference, () => false);
  const above = (values) => areaPath(zero, clamp(values, (value) => value > 0), frame);
  const below = (values) => areaPath(clamp(values, (value) => value < 0), zero, frame);
  const area = (values) => above(values) + below(values);
  const times = (values, sign) => values.map((value) => sign * value);
  const noiseArea = noise !== null && !settings.hidden.has("noise-band") && areaPath(times(noise, -1), noise, frame);
  const bar = `, bar ± ${show(metric.bar_percent, "bar")} ${metric.scaled ? "of |A|" : "absolute"}`;
  return [
    valueAxis(ticks([-reach, reach], 4), y, box),
    svg("text.axis-name", { x: MARGIN.left, y: box.top - 10 }, "difference B − A", tolerance === null ? "" : bar),
    svg(
      "g",
      { "clip-path": "url(#clip-strip)" },
      noiseArea && pathOf("noise-band", noiseArea),
      pathOf("difference", area(difference)),
      pathOf("difference beyond", area(beyond)),
      pathOf("curve difference-line", linePath(difference, frame), "difference"),
      tolerance && [1, -1].map((sign) => pathOf("curve bar-line", linePath(times(tolerance, sign), frame), "bar")),
    ),
  ];
}

/** The divergence step and the worst step. */
function marks(metric, { x, domain, box, width }) {
  const { parted_at: diverged, worst_step: worst } = metric.figures;
  const shown = (step) => step !== null && step >= domain[0] && step <= domain[1];
  const at = x(diverged);
  const flip = at > width - 150;
  const text = { x: flip ? at - 6 : at + 6, y: box.top + 12, "text-anchor": flip ? "end" : "start" };
  const line = { x1: at, x2: at, y1: box.top, y2: box.bottom };
  const arrow = `M${x(worst)} ${box.bottom - 10}l5 9h-10z`;
  return [
    shown(diverged) &&
      svg("g.mark.diverged", svg("line", line), svg("text", text, `diverged at ${show(diverged, "count")}`)),
    shown(worst) && svg("path.mark.worst", { d: arrow }, svg("title", `worst step ${show(worst, "count")}`)),
  ];
}

/** The chart of the chosen metric, its legend, its controls and its figures. */
function makeExplorer(root) {
  const settings = { index: 0, view: null, half: 0, log: false, fit: false, hidden: new Set() };
  const [title, legend, controls] = ["explorer-title", "legend", "controls"].map((name) => el(`div.${name}`));
  const plot = el("div.plot");
  const tooltip = el("div.tooltip", { hidden: true });
  const details = el("dl.details");
  root.append(title, el("div.toolbar", legend, controls), el("div.stage", plot, tooltip), details);
  const reset = resetButton(() => zoom(null));
  let smoothing = null;
  let series = null;
  let chart = null;

  const metric = () => DATA.metrics[settings.index];
  function draw() {
    settings.half = smoothing.half(series.steps.length);
    chart = drawComparison(plot, metric(), series, settings);
    reset.hidden = settings.view === null;
    tooltip.hidden = true;
    followPointer(chart, { hover, leave: () => hideCrosshair(chart, tooltip), zoom: zoomTo });
  }

  function choose(index) {
    Object.assign(settings, { index, view: null, log: false });
    series = seriesOf(metric());
    smoothing = smoothingSlider("steps", draw);
    const positive = extent([series.a, series.b], 0, series.steps.length)?.[1] > 0;
    title.replaceChildren(...explorerTitle(metric()));
    legend.replaceChildren(...legendOf(metric(), settings, draw));
    controls.replaceChildren(
      reset,
      smoothing.label,
      choice("log", "Log scale", positive),
      choice("fit", "Fit difference", metric().bar_percent !== null),
    );
    details.replaceChildren(...detailsOf(index));
    draw();
  }

  function choice(name, label, possible) {
    const change = (event) => {
      settings[name] = event.target.checked;
      draw();
    };
    const state = { disabled: !possible, checked: settings[name] };
    return el("label", el("input", { type: "checkbox", id: name, ...state, onchange: change }), label);
  }

  function zoom(view) {
    settings.view = view;
    draw();
  }

  function zoomTo(edges) {
    if (edges === null) return zoom(null);
    const [first, last] = edges.map((step) => nearestIndex(series.steps, step));
    if (last > first) zoom([series.steps[first], series.steps[last]]);
  }

  function hover(position) {
    const [low, high] = chart.domain.map((step) => nearestIndex(series.steps, step));
    const i = Math.max(low, Math.min(high, nearestIndex(series.steps, chart.x.invert(position))));
    const cx = chart.x(series.steps[i]);
    const dots = ["a", "b"]
      .filter((letter) => !settings.hidden.has(letter) && !Number.isNaN(chart.y(series[letter][i])))
      .map((letter) =>
        svg(`circle.${letter}`, { cx, cy: chart.y(series[letter][i]), r: 4, "clip-path": "url(#clip-curves)" }),
      );
    showCrosshair(chart, cx, dots, tooltip, tooltipOf(series, i));
  }

  onResize(plot, 320, () => chart, draw);
  return { choose };
}

function tooltipOf({ steps, a, b, repeats }, i) {
  const key = (text) => el("span.key", text);
  const difference = b[i] - a[i];
  return [
    el("div.tooltip-step", "step ", hoverValue("step", steps[i], "count")),
    el(
      "div.tooltip-grid",
      [side("a"), hoverValue("a", a[i]), side("b"), hoverValue("b", b[i])],
      repeats.map((repeat, n) => [key(`repeat ${show(n + 1, "count")}`), hoverValue(`repeat${n}`, repeat[i])]),
      [key("B − A"), hoverValue("difference", difference, "signed")],
      [key("of |A|"), hoverValue("relative", (100 * difference) / Math.abs(a[i]), "percents")],
    ),
  ];
}

function explorerTitle({ name, names, verdict, decided_by: reason, matching }) {
  const renamed = names.some((other) => other !== name);
  const [inA, inB] = names.map((other) => el("code", other));
  return [
    el("div.title-line", el("h3", name), badge(verdict)),
    verdict !== null && el("p.decided", reason),
    matching && el("p.decided", matching),
    renamed && el("p.quiet", "written as ", inA, " in A and ", inB, " in B"),
  ].filter(Boolean);
}

function legendOf({ repeats, bar_percent: bar, noise }, settings, draw) {
  const entries = [
    ["a", `A · ${runName(DATA.a)}`],
    ["b", `B · ${runName(DATA.b)}`],
    repeats.length > 0 && ["repeats", plural(repeats.length, "repeat")],
    bar !== null && ["bar-band", `bar around A (${show(bar, "bar")})`],
    noise !== null && ["noise-band", `noise of repeats (${show(noise.mean_error_percent, "percent")})`],
  ];
  return entries.filter(Boolean).map(([key, label]) => {
    const toggle = (event) => {
      if (!settings.hidden.delete(key)) settings.hidden.add(key);
      event.currentTarget.setAttribute("aria-pressed", String(!settings.hidden.has(key)));
      draw();
    };
    const pressed = { "data-toggle": key, "aria-pressed": String(!settings.hidden.has(key)) };
    return el("button.legend-entry", { type: "button", ...pressed, onclick: toggle }, el(`i.swatch.${key}`), label);
  });
}

/** The drift and the collapse that the test finds with 95 % probability. */
function detectable(i) {
  const at = (name, style) => figure(`metrics.${i}.power.${name}`, style);
  const collapse = [", a collapse of ", at("collapse"), " in the last ", at("collapse_steps", "count"), " steps"];
  const latest = ["; one of ten noise sd as late as step ", at("latest_step", "count")];
  return ["a drift of ", at("drift"), collapse, latest, "; real drift within ", at("drift_within")];
}

function detailsOf(index) {
  const { power, findings, noise } = DATA.metrics[index];
  const at = (name, style) => figure(`metrics.${index}.${name}`, style);
  const of = (name, style) => at(`figures.${name}`, style);
  const rows = [
    ["Mean error, absolute", of("mean_error_percent", "percent")],
    ["Scaled error", of("scaled_error_percent", "percent")],
    ["Mean relative error", of("relative_error_percent", "percent")],
    ["Worst difference", of("worst"), " at step ", of("worst_step", "count")],
    ["Drift, mean of B − A", of("drift", "signed")],
    ["Correlation", of("correlation", "precise")],
    ["Diverged at step", of("parted_at", "count")],
    ["Common steps", of("steps", "count"), ", from ", of("first", "count"), " to ", of("last", "count")],
  ];
  if (power !== null) rows.push(["Noise, sd of a step", at("power.noise_sd")], ["Found with 95 %", detectable(index)]);
  findings.forEach(({ statistic }, i) => {
    const [difference, limit] = [at(`findings.${i}.difference`, "signed"), at(`findings.${i}.noise`)];
    const [first, last] = ["first", "last"].map((name) => at(`findings.${i}.${name}`, "count"));
    rows.push([`More than noise: ${statistic}`, difference, ", noise within ", limit, ", steps ", first, " to ", last]);
  });
  if (noise !== null) {
    const count = [" over ", at("noise.repeats", "count"), noise.repeats === 1 ? " repeat" : " repeats"];
    rows.push(["Mean error between repeats", at("noise.mean_error_percent", "percent"), count]);
    const excess = [at("noise.excess_low", "percents"), " to ", at("noise.excess_high", "percents")];
    rows.push(["Error beyond that of a repeat, 95 %", excess]);
  }
  return definitions(rows);
}
