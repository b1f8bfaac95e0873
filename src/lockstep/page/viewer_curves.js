// The curves of the shown runs: one chart per metric, fetched when it becomes visible and when its data grows.

const CHART_HEIGHT = { small: 190, large: 400 };
const BUCKETS = { small: 240, large: 900 };
const CHARTS_AT_ONCE = 16;
const OTHERS = "other";
const REDRAW_MS = 1500;

function makeCurves(root) {
  const settings = { view: null, slider: 0, log: false, filter: "" };
  /** The reply of api/run for each shown run: metrics, version, read, range. */
  const known = new Map();
  const cards = new Map();
  const stale = new Set();
  const inView = new Set();
  let busy = false;
  let redrawn = 0;
  let changed = false;
  let asked = 0;

  const filter = el(
    "input",
    { type: "search", id: "metric-filter", placeholder: "Filter metrics", "aria-label": "Filter metrics" },
  );
  const smooth = el("input", { type: "range", id: "smooth", min: 0, max: MOST_SMOOTHING, value: 0 });
  const window_ = el("output", { for: "smooth" }, "off");
  const log = el("input", { type: "checkbox", id: "log" });
  const all = el("button", { type: "button", id: "reset", hidden: "" }, "Show all steps");
  const legend = el("div", { class: "legend" });
  const progress = el("p", { class: "quiet", id: "progress", role: "status" });
  const groups = el("div", { class: "groups" });
  root.append(
    el(
      "div",
      { class: "toolbar" },
      el("div", { class: "legend-line" }, filter, legend),
      el(
        "div",
        { class: "controls" },
        all,
        el("label", { class: "slider" }, "Smooth ", smooth, window_),
        el("label", {}, log, "Log scale"),
      ),
    ),
    progress,
    groups,
  );

  filter.addEventListener("input", () => {
    settings.filter = filter.value.trim().toLowerCase();
    layOut();
  });
  smooth.addEventListener("input", () => {
    settings.slider = Number(smooth.value);
    everythingStale();
  });
  log.addEventListener("change", () => {
    settings.log = log.checked;
    for (const card of cards.values()) card.draw();
  });
  all.addEventListener("click", () => zoom(null));

  const half = () => {
    const range = wholeRange();
    return range === null ? 0 : halfWindow(settings.slider, range[1] - range[0] + 1);
  };

  function wholeRange() {
    const ranges = [...known.values()].map((one) => one.range).filter((range) => range !== null);
    if (ranges.length === 0) return null;
    return [Math.min(...ranges.map((range) => range[0])), Math.max(...ranges.map((range) => range[1]))];
  }

  function zoom(view) {
    settings.view = view;
    all.hidden = view === null;
    everythingStale();
  }

  function everythingStale() {
    const points = half();
    window_.textContent = points === 0 ? "off" : `${show(2 * points + 1, "count")} points`;
    for (const name of cards.keys()) stale.add(name);
    asked += 1;
    pump();
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) inView.add(entry.target.dataset.metric);
        else inView.delete(entry.target.dataset.metric);
      }
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
        const large = wanted[0].large;
        const batch = wanted.filter((card) => card.large === large).slice(0, CHARTS_AT_ONCE);
        const number = asked;
        const told = await telling(() =>
          ask("curves", {
            run: shownRuns(),
            metric: batch.map((card) => card.name),
            buckets: BUCKETS[large ? "large" : "small"],
            half: half() || null,
            first: settings.view?.[0],
            last: settings.view?.[1],
          }),
        );
        if (told === null) return;
        if (number !== asked) continue;
        for (const card of batch) {
          stale.delete(card.name);
          card.take(Object.hasOwn(told.curves, card.name) ? told.curves[card.name] : {}, told.domain);
        }
      }
    } finally {
      busy = false;
    }
  }

  function makeCard(name) {
    const plot = el("div", { class: "plot" });
    const tooltip = el("div", { class: "tooltip", hidden: "" });
    const latest = el("span", { class: "latest" });
    const note = el("p", { class: "quiet odd-note", hidden: "" });
    const larger = el("button", { type: "button", class: "larger", "aria-pressed": "false", title: "Larger" }, "⤢");
    larger.setAttribute("aria-label", `${name} larger`);
    const element = el(
      "section",
      { class: "metric-card", "data-metric": name, tabindex: 0, "aria-label": name },
      el("div", { class: "metric-head" }, metricName(name), latest, larger),
      el("div", { class: "stage" }, plot, tooltip),
      note,
    );
    const card = { name, element, large: false, curves: null, domain: null, drawing: null, step: null };
    card.take = (told, domain) => {
      card.curves = shownRuns()
        .filter((run) => Object.hasOwn(told, run))
        .map((run) => curveOf(run, told[run]));
      card.domain = domain;
      latest.replaceChildren(...latestOf(card.curves));
      latest.classList.toggle("several", card.curves.length > 1);
      card.draw();
    };
    card.draw = () => {
      if (card.curves === null || card.domain === null) return;
      const remarks = [oddNote(card.curves), settings.log ? logNote(card.curves) : ""];
      note.textContent = remarks.filter((text) => text !== "").join("; ");
      note.hidden = note.textContent === "";
      const height = CHART_HEIGHT[card.large ? "large" : "small"];
      card.drawing = drawMetric(plot, name, card.curves, card.domain, { log: settings.log, height });
      followPointer(
        card.drawing,
        { hover: (at) => card.look(card.drawing.x.invert(at)), leave: card.leave, zoom: between },
      );
      if (card.step !== null && !tooltip.hidden) card.look(card.step);
    };
    card.look = (wanted) => {
      const step = nearestStep(card.curves ?? [], wanted);
      if (step === null) return;
      card.step = step;
      showStep(card.drawing, tooltip, step);
    };
    card.leave = () => {
      hideCrosshair(card.drawing, tooltip);
    };
    const enlarge = () => {
      card.large = !card.large;
      element.classList.toggle("large", card.large);
      larger.setAttribute("aria-pressed", String(card.large));
      stale.add(name);
      asked += 1;
      card.draw();
      pump();
    };
    larger.addEventListener("click", enlarge);
    element.addEventListener("blur", card.leave);
    element.addEventListener("keydown", (event) => {
      if (event.target !== element) return;
      const steps = card.curves?.[0]?.steps ?? [];
      const place = card.step === null || steps.length === 0 ? steps.length - 1 : nearestPlace(steps, card.step);
      const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1 }[event.key];
      if (event.key === "Enter") enlarge();
      else if (event.key === "Escape") card.leave();
      else if (next !== undefined && steps.length > 0) card.look(steps[Math.max(0, Math.min(steps.length - 1, next))]);
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => {
      if (card.drawing !== null && plot.clientWidth > 0 && plot.clientWidth !== card.drawing.width) card.draw();
    }).observe(plot);
    watcher.observe(element);
    stale.add(name);
    return card;
  }

  function between(edges) {
    if (edges === null) return zoom(null);
    const [first, last] = edges.map(Math.round);
    if (last > first) zoom([first, last]);
  }

  /** Cards of all metrics, in groups by the part of a name before the first slash; what one looks at first is first. */
  function layOut() {
    const names = [...new Set(shownRuns().flatMap((run) => known.get(run)?.metrics ?? []))];
    const wanted = names.filter((name) => name.toLowerCase().includes(settings.filter));
    const first = state.listed.first.filter((name) => wanted.includes(name));
    const byGroup = new Map(first.length > 0 ? [["first", first]] : []);
    for (const name of wanted) {
      if (first.includes(name)) continue;
      const group = name.includes("/") ? name.split("/")[0] : OTHERS;
      byGroup.set(group, [...(byGroup.get(group) ?? []), name]);
    }
    const closed = new Set([...groups.querySelectorAll("details:not([open])")].map((one) => one.dataset.group));
    const layout = JSON.stringify([...byGroup]);
    if (groups.dataset.layout === layout) return;
    groups.dataset.layout = layout;
    groups.replaceChildren(
      ...[...byGroup].map(([group, members]) => {
        for (const name of members) if (!cards.has(name)) cards.set(name, makeCard(name));
        return el(
          "details",
          { class: "group", "data-group": group, open: closed.has(group) ? null : "" },
          el(
            "summary",
            {},
            group === "first" ? "At a glance" : visible(group),
            el("span", { class: "quiet" }, ` ${show(members.length, "count")}`),
          ),
          el(
            "div",
            { class: "grid" },
            members.map((name) => cards.get(name).element),
          ),
        );
      }),
    );
    if (byGroup.size === 0) groups.append(el("p", { class: "card quiet" }, emptyReason(names)));
  }

  function emptyReason(names) {
    if (names.length > 0) return "No metric has this in its name.";
    return "This run has not logged a step yet. Curves appear here as it does.";
  }

  function drawLegend() {
    const runs = shownRuns();
    legend.replaceChildren(
      ...(runs.length < 2 ? [] : runs.map((run) => el("span", { class: "legend-entry" }, swatch(run), visible(run)))),
    );
  }

  /** Asks how far the shown runs are; draws again what has changed. True where a run has more to read at once. */
  async function update() {
    const runs = shownRuns();
    const told = await telling(() => Promise.all(runs.map((run) => ask("run", { run }))));
    if (told === null || JSON.stringify(runs) !== JSON.stringify(shownRuns())) return false;
    changed ||= known.size !== runs.length;
    for (const run of [...known.keys()]) if (!runs.includes(run)) known.delete(run);
    for (const one of told) {
      changed ||= known.get(one.run)?.version !== one.version;
      known.set(one.run, one);
      Object.assign(
        infoOf(one.run) ?? {},
        { running: one.running, step: one.step, value: one.value, written: one.written },
      );
    }
    const reading = told.filter((one) => one.read < 1);
    const damaged = told.filter((one) => one.damaged > 0);
    progress.textContent = [
      ...reading.map((one) => `${one.run}: ${Math.round(100 * one.read)} % of its metrics read`),
      ...damaged.map(
        (one) => `${one.run}: ${show(one.damaged, "count")} lines of metrics.jsonl are damaged and left out`,
      ),
    ].join("; ");
    drawLegend();
    layOut();
    // While a long log is being read, drawing it again and again would be most of the work.
    if (changed && (reading.length === 0 || performance.now() - redrawn > REDRAW_MS)) {
      changed = false;
      redrawn = performance.now();
      everythingStale();
    }
    return reading.length > 0;
  }

  function choose() {
    redrawn = 0;
    known.clear();
    for (const card of cards.values()) watcher.unobserve(card.element);
    cards.clear();
    stale.clear();
    inView.clear();
    delete groups.dataset.layout;
    groups.replaceChildren();
    settings.view = null;
    all.hidden = true;
  }

  return { update, choose, focusFilter: () => filter.focus(), pump };
}

function latestOf(curves) {
  return curves.slice(0, 3).map((curve) => {
    const value = curve.values.length === 0 ? NaN : curve.values[curve.values.length - 1];
    return el(
      "span",
      { class: "figure", "data-run": curve.run, "data-value": String(value) },
      curves.length > 1 ? swatch(curve.run) : null,
      show(value),
    );
  });
}

function logNote(curves) {
  const some = curves.some((curve) => curve.values.some((value) => value <= 0));
  return some ? "values of 0 or less are not on a log scale" : "";
}

function oddNote(curves) {
  return curves
    .filter((curve) => curve.odd.count > 0)
    .map((curve) => {
      const [step, value] = curve.odd.first[0];
      const steps = curve.odd.count === 1 ? "1 step is" : `${show(curve.odd.count, "count")} steps are`;
      const whose = curves.length > 1 ? `${curve.run}: ` : "";
      return `${whose}${steps} no number, first ${value} at step ${show(step, "step")}`;
    })
    .join("; ");
}
