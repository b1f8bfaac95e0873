// The chart with its controls: choose a metric, look at a step, zoom by dragging, smooth, switch to a log scale.

function makeExplorer(root) {
  const settings = { index: 0, view: null, half: 0, log: false, fit: false, hidden: new Set() };
  const parts = {
    title: el("div", { class: "explorer-title" }),
    legend: el("div", { class: "legend" }),
    controls: el("div", { class: "controls" }),
    plot: el("div", { class: "plot" }),
    tooltip: el("div", { class: "tooltip", hidden: "" }),
    details: el("dl", { class: "details" }),
  };
  const stage = el("div", { class: "stage" }, parts.plot, parts.tooltip);
  root.append(parts.title, el("div", { class: "toolbar" }, parts.legend, parts.controls), stage, parts.details);
  let series = null;
  let drawing = null;

  const metric = () => DATA.metrics[settings.index];
  function draw() {
    drawing = drawChart(parts.plot, metric(), series, settings);
    parts.reset.hidden = settings.view === null;
    parts.tooltip.hidden = true;
    followPointer(drawing, { hover, leave, zoom: between });
  }

  function choose(index) {
    Object.assign(settings, { index, view: null, log: false, half: 0 });
    series = seriesOf(metric());
    parts.title.replaceChildren(...explorerTitle(metric()));
    parts.legend.replaceChildren(...legendOf(metric(), settings, draw));
    parts.controls.replaceChildren(...controls());
    parts.details.replaceChildren(...detailsOf(index));
    draw();
  }

  function controls() {
    const positive = extent([series.a, series.b], 0, series.steps.length)?.[1] > 0;
    const smooth = el("input", { type: "range", id: "smooth", min: 0, max: MOST_SMOOTHING, value: 0 });
    const window = el("output", { for: "smooth" }, "off");
    smooth.addEventListener("input", () => {
      settings.half = halfWindow(Number(smooth.value), series.steps.length);
      window.textContent = settings.half === 0 ? "off" : `${show(2 * settings.half + 1, "count")} steps`;
      draw();
    });
    parts.reset = el("button", { type: "button", id: "reset", hidden: "" }, "Show all steps");
    parts.reset.addEventListener("click", () => zoom(null));
    return [
      parts.reset,
      el("label", { class: "slider" }, "Smooth ", smooth, window),
      choice("log", "Log scale", positive, (on) => {
        settings.log = on;
      }),
      choice(
        "fit",
        "Fit difference",
        metric().bar_percent !== null,
        (on) => {
          settings.fit = on;
        },
        settings.fit,
      ),
    ];
  }

  function choice(id, label, possible, set, checked = false) {
    const box = el("input", { type: "checkbox", id, disabled: possible ? null : "", checked: checked ? "" : null });
    box.addEventListener("change", () => {
      set(box.checked);
      draw();
    });
    return el("label", {}, box, label);
  }

  function zoom(view) {
    settings.view = view;
    draw();
  }

  function between(edges) {
    if (edges === null) return zoom(null);
    const [first, last] = edges.map((step) => nearestPlace(series.steps, step));
    if (last > first) zoom([series.steps[first], series.steps[last]]);
  }

  const leave = () => hideCrosshair(drawing, parts.tooltip);

  function hover(at) {
    const [low, high] = drawing.domain.map((step) => nearestPlace(series.steps, step));
    const i = Math.max(low, Math.min(high, nearestPlace(series.steps, drawing.x.invert(at))));
    const x = drawing.x(series.steps[i]);
    const dots = ["a", "b"]
      .filter((letter) => !settings.hidden.has(letter) && !Number.isNaN(drawing.yOf(series[letter][i])))
      .map((letter) => {
        const at = { cx: x, cy: drawing.yOf(series[letter][i]), r: 4 };
        return svg("circle", { class: letter, ...at, "clip-path": "url(#clip-curves)" });
      });
    showCrosshair(drawing, x, dots, parts.tooltip, tooltipOf(series, i));
  }

  new ResizeObserver(() => {
    if (drawing !== null && parts.plot.clientWidth !== drawing.width && parts.plot.clientWidth >= 320) draw();
  }).observe(parts.plot);
  return { choose };
}

function tooltipOf(series, i) {
  const difference = series.b[i] - series.a[i];
  const value = (name, number, style) =>
    el("span", { "data-hover": name, "data-value": String(number) }, show(number, style));
  const repeats = series.repeats.map((repeat, n) => [
    el("span", { class: "key" }, `repeat ${show(n + 1, "count")}`),
    value(`repeat${n}`, repeat[i], "precise"),
  ]);
  return [
    el("div", { class: "tooltip-step" }, "step ", value("step", series.steps[i], "step")),
    el(
      "div",
      { class: "tooltip-grid" },
      side("a"),
      value("a", series.a[i], "precise"),
      side("b"),
      value("b", series.b[i], "precise"),
      ...repeats,
      el("span", { class: "key" }, "B − A"),
      value("difference", difference, "signed"),
      el("span", { class: "key" }, "of |A|"),
      value("relative", (100 * difference) / Math.abs(series.a[i]), "percents"),
    ),
  ];
}

function explorerTitle(metric) {
  const [ours, theirs] = metric.names;
  const alias =
    ours === metric.name && theirs === metric.name
      ? null
      : el("p", { class: "quiet" }, "written as ", el("code", {}, ours), " in A and ", el("code", {}, theirs), " in B");
  return [
    el("div", { class: "title-line" }, el("h3", {}, metric.name), badge(metric.verdict)),
    metric.verdict !== null ? el("p", { class: "decided" }, metric.decided_by) : null,
    metric.matching ? el("p", { class: "decided" }, metric.matching) : null,
    alias,
  ].filter((part) => part !== null);
}

function legendOf(metric, settings, draw) {
  const entries = [
    ["a", `A · ${runName(DATA.a)}`],
    ["b", `B · ${runName(DATA.b)}`],
  ];
  if (metric.repeats.length > 0)
    entries.push(["repeats", `${show(metric.repeats.length, "count")} repeat${metric.repeats.length > 1 ? "s" : ""}`]);
  if (metric.bar_percent !== null) entries.push(["bar-band", `bar around A (${show(metric.bar_percent, "bar")})`]);
  if (metric.noise !== null)
    entries.push(["noise-band", `noise of repeats (${show(metric.noise.mean_error_percent, "percent")})`]);
  return entries.map(([key, label]) => {
    const button = el(
      "button",
      { type: "button", class: "legend-entry", "data-toggle": key, "aria-pressed": String(!settings.hidden.has(key)) },
      el("i", { class: `swatch ${key}` }),
      label,
    );
    button.addEventListener("click", () => {
      if (!settings.hidden.delete(key)) settings.hidden.add(key);
      button.setAttribute("aria-pressed", String(!settings.hidden.has(key)));
      draw();
    });
    return button;
  });
}

function detailsOf(index) {
  const path = `metrics.${index}`;
  const at = (name, style) => figure(`${path}.figures.${name}`, style);
  const { noise } = DATA.metrics[index];
  const rows = [
    ["Mean error, absolute", [at("mean_error_percent", "percent")]],
    ["Scaled error", [at("scaled_error_percent", "percent")]],
    ["Mean relative error", [at("relative_error_percent", "percent")]],
    ["Worst difference", [at("worst", "number"), " at step ", at("worst_step", "step")]],
    ["Drift, mean of B − A", [at("drift", "signed")]],
    ["Correlation", [at("correlation", "precise")]],
    ["Parted at step", [at("parted_at", "step")]],
    ["Common steps", [at("steps", "count"), ", from ", at("first", "step"), " to ", at("last", "step")]],
  ];
  if (DATA.metrics[index].power !== null) {
    rows.push(["Noise, sd of a step", [figure(`${path}.power.noise_sd`, "number")]]);
    rows.push(["Seen with 95 %", seen(index).slice(1)]);
  }
  DATA.metrics[index].findings.forEach((found, i) => {
    const of = (name, style) => figure(`${path}.findings.${i}.${name}`, style);
    rows.push([
      `Not by noise: ${found.statistic}`,
      [
        of("difference", "signed"),
        ", noise within ",
        of("noise", "number"),
        ", steps ",
        of("first", "step"),
        " to ",
        of("last", "step"),
      ],
    ]);
  });
  if (noise !== null) {
    rows.push([
      "Mean error between repeats",
      [
        figure(`${path}.noise.mean_error_percent`, "percent"),
        " over ",
        figure(`${path}.noise.repeats`, "count"),
        noise.repeats === 1 ? " repeat" : " repeats",
      ],
    ]);
    rows.push([
      "Beyond a repeat's, 95 %",
      [figure(`${path}.noise.excess_low`, "percents"), " to ", figure(`${path}.noise.excess_high`, "percents")],
    ]);
  }
  return rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}
