// The curves of the shown runs: one chart per metric, fetched when it becomes visible and when its data grows.

const MARGIN = { left: 58, right: 14, top: 10, bottom: 26 };
const CHART_HEIGHT = { small: 190, large: 400 };
const BUCKETS = { small: 240, large: 900 };
const CHARTS_AT_ONCE = 16;
const REDRAW_MS = 1500;
let charts = 0;

/** A curve as arrays: its points, and a gap (NaN) for each NaN or infinite value in the log. */
function curveOf(run, { steps, values, mean, odd }) {
  const points = [...steps.map((step, i) => [step, values[i]]), ...odd.first.map(([step]) => [step, NaN])];
  points.sort((one, other) => one[0] - other[0]);
  return {
    run,
    color: colorOf(run),
    steps: Float64Array.from(points, (point) => point[0]),
    values: Float64Array.from(points, (point) => point[1]),
    mean: mean ? { steps: Float64Array.from(mean.steps), values: numbers(mean.values) } : null,
    odd,
  };
}

/** Draws `curves` between the steps of `domain`. */
function drawMetric(root, name, curves, domain, { log, height }) {
  const chart = layChart(root, 260, height, MARGIN, domain);
  const { box, x } = chart;
  const drawn = curves.flatMap((curve) => [curve, ...(curve.mean ? [curve.mean] : [])]).map(({ values }) => values);
  const spans = drawn.map((values) => extent([log ? positiveOnly(values) : values], 0, values.length)).filter(given);
  const span = extent([spans.flat()], 0, 2 * spans.length);
  const { y, marked } = valueScale(span, log, [box.bottom, box.top], height > 250 ? 7 : 4);
  const id = `clip-${(charts += 1)}`;
  const path = ({ run, color }, { steps, values }, kind = "") => {
    const frame = pathFrame({ x, from: 0, to: values.length, columns: null }, steps, y, box.bottom);
    return svg("path", { class: `curve s${color}${kind}`, "data-run": run, d: linePath(values, frame) });
  };
  const lines = curves.map((curve) => [
    path(curve, curve, curve.mean ? " raw" : ""),
    curve.mean && path(curve, curve.mean),
  ]);
  const content = [
    valueAxis(marked, y, box),
    svg("g", { "clip-path": `url(#${id})` }, lines.reverse()),
    curves.map((curve) => oddMarks(curve, x, domain, box)),
  ];
  const label = `${name}: ${curves.map((curve) => curve.run).join(", ")}`;
  return Object.assign(drawChart(root, chart, label, { [id]: box }, content), { y, curves });
}

/** Marks at the upper edge for NaN and infinite values. */
function oddMarks(curve, x, domain, box) {
  return curve.odd.first
    .filter(([step]) => step >= domain[0] && step <= domain[1])
    .map(([step, value]) => {
      const title = svg("title", `${value} at step ${show(step, "count")}`);
      return svg(`path.odd.s${curve.color}`, { d: `M${x(step)} ${box.top + 7}l4 -7h-8z` }, title);
    });
}

/** The point of each curve that is nearest to a step. */
function pointsAt(curves, step) {
  return curves
    .filter((curve) => curve.steps.length > 0)
    .map((curve) => {
      const i = nearestIndex(curve.steps, step);
      return { curve, step: curve.steps[i], value: curve.values[i] };
    });
}

/** The step of any curve that is nearest to `step`; null if there is none. */
function nearestStep(curves, step) {
  const steps = pointsAt(curves, step).map((point) => point.step);
  const nearer = (one, best) => best === null || Math.abs(one - step) < Math.abs(best - step);
  return steps.reduce((best, one) => (nearer(one, best) ? one : best), null);
}

function showStep(chart, tooltip, step) {
  const points = pointsAt(chart.curves, step);
  const dots = points
    .filter((point) => !Number.isNaN(chart.y(point.value)))
    .map(({ curve, step: at, value }) => {
      return svg(`circle.s${curve.color}`, { cx: chart.x(at), cy: chart.y(value), r: 3.5 });
    });
  const names = points.map((point) => runName(point.curve.run));
  const rows = points.map(({ curve: { run }, step: at, value }, i) => {
    // The path of a run if another shown run has the same name.
    const name = names.filter((other) => other === names[i]).length > 1 ? run : names[i];
    const number = hoverValue(run, value);
    number.append(at === step ? "" : el("small", ` step ${show(at, "count")}`));
    return [el("span.key", swatch(run), visible(name)), number];
  });
  const title = el("div.tooltip-step", { "data-value": step }, "step ", show(step, "count"));
  showCrosshair(chart, chart.x(step), dots, tooltip, [title, el("div.tooltip-grid", rows)]);
}

/** The card of one metric. `settings.log` selects the scale; `reload` fetches its data; `zoom` selects steps. */
function makeCard(name, settings, reload, zoom) {
  const plot = el("div.plot");
  const tooltip = el("div.tooltip", { hidden: true });
  const latest = el("span.latest");
  const note = el("p.quiet.odd-note", { hidden: true });
  const labels = { title: "Larger", "aria-label": `${name} larger` };
  const larger = el("button.larger", { type: "button", "aria-pressed": "false", ...labels, onclick: enlarge }, "⤢");
  const element = el(
    "section.metric-card",
    { "data-metric": name, tabindex: 0, "aria-label": name, onblur: leave, onkeydown: onKey },
    el("div.metric-head", metricName(name), latest, larger),
    el("div.stage", plot, tooltip),
    note,
  );
  const card = { name, element, large: false, take, draw };
  let [curves, domain, chart, current] = [null, null, null, null];

  function take(replies, range) {
    curves = shownRuns().filter((run) => Object.hasOwn(replies, run)).map((run) => curveOf(run, replies[run]));
    domain = range;
    latest.replaceChildren(...latestOf(curves));
    latest.classList.toggle("several", curves.length > 1);
    draw();
  }

  function draw() {
    if (curves === null || domain === null) return;
    note.textContent = [oddNote(curves), settings.log ? logNote(curves) : ""].filter(Boolean).join("; ");
    note.hidden = note.textContent === "";
    const height = CHART_HEIGHT[card.large ? "large" : "small"];
    chart = drawMetric(plot, name, curves, domain, { log: settings.log, height });
    followPointer(chart, { hover: (position) => hover(chart.x.invert(position)), leave, zoom });
    if (current !== null && !tooltip.hidden) hover(current);
  }

  function hover(wanted) {
    const step = nearestStep(curves ?? [], wanted);
    if (step === null) return;
    current = step;
    showStep(chart, tooltip, step);
  }

  function leave() {
    hideCrosshair(chart, tooltip);
  }

  function enlarge() {
    card.large = !card.large;
    element.classList.toggle("large", card.large);
    larger.setAttribute("aria-pressed", String(card.large));
    draw();
    reload(name);
  }

  function onKey(event) {
    if (event.target !== element) return;
    const steps = curves?.[0]?.steps ?? [];
    const last = steps.length - 1;
    const i = current === null || last < 0 ? last : nearestIndex(steps, current);
    const next = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter") enlarge();
    else if (event.key === "Escape") leave();
    else if (next !== undefined && last >= 0) hover(steps[Math.max(0, Math.min(last, next))]);
    else return;
    event.preventDefault();
  }

  onResize(plot, 1, () => chart, draw);
  return card;
}

function makeCurves(root) {
  const settings = { view: null, log: false, filter: "" };
  /** The reply of api/run for each shown run: metrics, version, read, range. */
  const replies = new Map();
  const cards = new Map();
  const stale = new Set();
  const inView = new Set();
  let busy = false;
  let redrawn = 0;
  let changed = false;
  let generation = 0;

  const filterLabels = { placeholder: "Filter metrics", "aria-label": "Filter metrics" };
  const filter = el("input", { type: "search", id: "metric-filter", ...filterLabels, oninput: applyFilter });
  const smoothing = smoothingSlider("points", refetch);
  const log = el("input", { type: "checkbox", id: "log", onchange: applyScale });
  const reset = resetButton(() => zoom(null));
  const legend = el("div.legend");
  const progress = el("p.quiet", { id: "progress", role: "status" });
  const groups = el("div.groups");
  const controls = el("div.controls", reset, smoothing.label, el("label", log, "Log scale"));
  root.append(el("div.toolbar", el("div.legend-line", filter, legend), controls), progress, groups);

  function applyFilter() {
    settings.filter = filter.value.trim().toLowerCase();
    layOut();
  }

  function applyScale() {
    settings.log = log.checked;
    for (const card of cards.values()) card.draw();
  }

  /** Half the smoothing window, for the steps of all shown runs. */
  function half() {
    const range = extent([[...replies.values()].flatMap((reply) => reply.range ?? [])], 0, 2 * replies.size);
    return range === null ? 0 : smoothing.half(range[1] - range[0] + 1);
  }

  function zoom(view) {
    settings.view = view;
    reset.hidden = view === null;
    refetch();
  }

  function zoomTo(edges) {
    if (edges === null) return zoom(null);
    const [first, last] = edges.map(Math.round);
    if (last > first) zoom([first, last]);
  }

  /** Marks charts as stale, all of them without `name`, and fetches those in view. */
  function refetch(name = null) {
    half();
    for (const each of typeof name === "string" ? [name] : cards.keys()) stale.add(each);
    generation += 1;
    pump();
  }

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) inView[entry.isIntersecting ? "add" : "delete"](entry.target.dataset.metric);
      pump();
    },
    { rootMargin: "250px" },
  );

  /** Fetches visible stale charts in batches until there are none. */
  async function pump() {
    if (busy || state.tab !== "curves") return;
    busy = true;
    try {
      for (;;) {
        const wanted = [...cards.values()].filter((card) => stale.has(card.name) && inView.has(card.name));
        if (wanted.length === 0) return;
        const { large } = wanted[0];
        const batch = wanted.filter((card) => card.large === large).slice(0, CHARTS_AT_ONCE);
        const current = generation;
        const [first, last] = settings.view ?? [];
        const buckets = BUCKETS[large ? "large" : "small"];
        const metric = batch.map((card) => card.name);
        const query = { run: shownRuns(), metric, buckets, half: half() || null, first, last };
        const reply = await attempt(() => request("curves", query));
        if (reply === null) return;
        if (current !== generation) continue;
        for (const card of batch) {
          stale.delete(card.name);
          card.take(Object.hasOwn(reply.curves, card.name) ? reply.curves[card.name] : {}, reply.domain);
        }
      }
    } finally {
      busy = false;
    }
  }

  function cardOf(name) {
    if (!cards.has(name)) {
      const card = makeCard(name, settings, refetch, zoomTo);
      observer.observe(card.element);
      stale.add(name);
      cards.set(name, card);
    }
    return cards.get(name);
  }

  /** Cards of all metrics, grouped by the part of a name before the first slash; the most important ones first. */
  function layOut() {
    const names = [...new Set(shownRuns().flatMap((run) => replies.get(run)?.metrics ?? []))];
    const wanted = names.filter((name) => name.toLowerCase().includes(settings.filter));
    const first = state.list.first.filter((name) => wanted.includes(name));
    const byGroup = new Map(first.length > 0 ? [["first", first]] : []);
    for (const name of wanted.filter((one) => !first.includes(one))) {
      const group = name.includes("/") ? name.split("/")[0] : "other";
      byGroup.set(group, [...(byGroup.get(group) ?? []), name]);
    }
    const layout = JSON.stringify([...byGroup]);
    if (groups.dataset.layout === layout) return;
    groups.dataset.layout = layout;
    const closed = new Set([...groups.querySelectorAll("details:not([open])")].map((one) => one.dataset.group));
    groups.replaceChildren(
      ...[...byGroup].map(([group, members]) => {
        const count = el("span.quiet", ` ${show(members.length, "count")}`);
        return el(
          "details.group",
          { "data-group": group, open: !closed.has(group) },
          el("summary", group === "first" ? "At a glance" : visible(group), count),
          el("div.grid", members.map((name) => cardOf(name).element)),
        );
      }),
    );
    const none = names.length > 0 ? "No metric has this in its name." : "This run has not logged a step yet.";
    if (byGroup.size === 0) groups.append(el("p.card.quiet", none));
  }

  /** Fetches the progress of the shown runs and draws what changed. True if a run has more to read immediately. */
  async function update() {
    const runs = shownRuns();
    const fresh = await attempt(() => Promise.all(runs.map((run) => request("run", { run }))));
    if (fresh === null || JSON.stringify(runs) !== JSON.stringify(shownRuns())) return false;
    changed ||= replies.size !== runs.length;
    for (const run of [...replies.keys()]) if (!runs.includes(run)) replies.delete(run);
    for (const reply of fresh) {
      changed ||= replies.get(reply.run)?.version !== reply.version;
      replies.set(reply.run, reply);
      const { running, step, value, written } = reply;
      Object.assign(infoOf(reply.run) ?? {}, { running, step, value, written });
    }
    const reading = fresh.filter(({ read }) => read < 1);
    const damaged = fresh.filter((reply) => reply.damaged > 0);
    progress.textContent = [
      ...reading.map(({ run, read }) => `${run}: ${Math.round(100 * read)} % of its metrics read`),
      ...damaged.map((one) => `${one.run}: ${show(one.damaged, "count")} damaged lines of metrics.jsonl are left out`),
    ].join("; ");
    const entries = runs.map((run) => el("span.legend-entry", swatch(run), visible(run)));
    legend.replaceChildren(...(runs.length < 2 ? [] : entries));
    layOut();
    // While a long log is being read, drawing it again and again would be most of the work.
    if (changed && (reading.length === 0 || performance.now() - redrawn > REDRAW_MS)) {
      changed = false;
      redrawn = performance.now();
      refetch();
    }
    return reading.length > 0;
  }

  function choose() {
    redrawn = 0;
    observer.disconnect();
    for (const collection of [replies, cards, stale, inView]) collection.clear();
    delete groups.dataset.layout;
    groups.replaceChildren();
    settings.view = null;
    reset.hidden = true;
  }

  return { update, choose, focusFilter: () => filter.focus() };
}

function latestOf(curves) {
  return curves.slice(0, 3).map(({ run, values }) => {
    const value = values.length === 0 ? NaN : values[values.length - 1];
    const attributes = { "data-run": run, "data-value": String(value) };
    return el("span.figure", attributes, curves.length > 1 && swatch(run), show(value));
  });
}

function logNote(curves) {
  const some = curves.some((curve) => curve.values.some((value) => value <= 0));
  return some ? "values of 0 or less are not on a log scale" : "";
}

function oddNote(curves) {
  const note = ({ run, odd }) => {
    const [step, value] = odd.first[0];
    const steps = odd.count === 1 ? "1 step is" : `${show(odd.count, "count")} steps are`;
    return `${curves.length > 1 ? `${run}: ` : ""}${steps} no number, first ${value} at step ${show(step, "count")}`;
  };
  return curves.filter((curve) => curve.odd.count > 0).map(note).join("; ");
}
