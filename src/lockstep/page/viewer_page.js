// The list of runs, the tabs and the keyboard: the frame of the run viewer.

const LIVE_SECONDS = 1.5;
const LIST_SECONDS = 5;

function factsOf(info) {
  const planned = Number.isInteger(info.steps) ? ` of ${show(info.steps, "count")}` : "";
  const steps = Number.isInteger(info.step) ? `step ${show(info.step, "count")}${planned}` : "no step yet";
  const value = typeof info.value === "number" ? `${info.metric} ${show(info.value)}` : null;
  return visible([info.problem, info.method, steps, value].filter(Boolean).join(" · "));
}

function makeRuns(root, choose) {
  const labels = { placeholder: "Filter runs", "aria-label": "Filter runs" };
  const filter = el("input", { type: "search", id: "run-filter", ...labels, oninput: draw });
  const list = el("ul.run-list");
  const leftOut = el("p.quiet.left-out", { hidden: true });
  const title = el("summary", "Runs ", el("span.quiet", { id: "run-count" }));
  const section = el("details.run-fold", { open: true }, title, filter, list, leftOut);
  root.append(section);
  let inView = null;
  const narrow = matchMedia("(max-width: 860px)");
  if (narrow.matches) section.open = false;
  narrow.addEventListener("change", () => {
    section.open = !narrow.matches;
  });

  const matching = () => {
    const text = filter.value.trim().toLowerCase();
    const fields = ({ run, method, model }) => [run, method ?? "", model ?? ""];
    return state.list.runs.filter((info) => fields(info).some((field) => field.toLowerCase().includes(text)));
  };

  function toggle(run) {
    if (run === state.run) return;
    if (state.overlaid.includes(run)) state.overlaid = state.overlaid.filter((other) => other !== run);
    else if (shownRuns().length < MAX_RUNS) state.overlaid = [...state.overlaid, run];
    else showMessage(`At most ${MAX_RUNS} runs can be overlaid.`);
    choose(state.run);
  }

  function entry(info) {
    const { run, running } = info;
    const chosen = run === state.run;
    const overlaid = chosen || state.overlaid.includes(run);
    const label = { "aria-label": `Overlay the curves of ${run}`, "data-over": run };
    const box = el("input", { type: "checkbox", ...label, disabled: chosen, onchange: () => toggle(run) });
    box.checked = overlaid;
    const current = { "data-run": run, "aria-current": chosen && "true" };
    const button = el(
      "button.run-name",
      { type: "button", ...current, onclick: () => choose(run) },
      el("span.run-title", visible(run), running && el("span.running", "running")),
      el("span.quiet.run-facts", factsOf(info)),
    );
    return el("li", { class: chosen && "chosen" }, el("span.over", box, overlaid && swatch(run)), button);
  }

  function draw() {
    const focused = document.activeElement;
    const name = ["run", "over"].find((one) => focused?.dataset[one] !== undefined);
    const selector = name && list.contains(focused) && `[data-${name}=${CSS.escape(focused.dataset[name])}]`;
    const runs = matching();
    list.replaceChildren(...runs.map(entry));
    const none = state.list.runs.length === 0 ? "No runs here yet." : "No run matches.";
    if (runs.length === 0) list.append(el("li.quiet.none", none));
    if (selector) list.querySelector(selector)?.focus();
    document.getElementById("run-count").textContent = show(state.list.runs.length, "count");
    const { left_out: others } = state.list;
    leftOut.hidden = others.length === 0;
    leftOut.textContent = visible(`Left out: ${others.slice(0, 5).join("; ")}${others.length > 5 ? " …" : ""}`);
    // Once for each choice, so that a reader can scroll the list.
    if (inView !== state.run) bringIntoView(list.querySelector(".chosen"), narrow.matches ? list : root);
    inView = state.run;
  }

  /** Not `scrollIntoView`, which moves the page too. */
  function bringIntoView(chosen, box) {
    if (chosen === null) return;
    const [inner, outer] = [chosen.getBoundingClientRect(), box.getBoundingClientRect()];
    const bottom = Math.min(outer.bottom, innerHeight);
    if (inner.top < outer.top || inner.bottom > bottom) box.scrollTop += inner.top - (outer.top + bottom) / 2;
  }

  /** Chooses the run `offset` places further down the list. */
  function move(offset) {
    const runs = matching().map((info) => info.run);
    const i = runs.indexOf(state.run);
    if (runs.length > 0) choose(runs[Math.max(0, Math.min(runs.length - 1, i < 0 ? 0 : i + offset))]);
  }

  function focusFilter() {
    section.open = true;
    filter.focus();
  }

  return { draw, move, toggle, focusFilter };
}

const main = document.getElementById("main");
const title = el("div.run-head");
const panels = {};
const tabs = {};
for (const name of TABS) {
  const [tab, panel] = [`tab-${name}`, `panel-${name}`];
  const button = { type: "button", role: "tab", id: tab, "aria-controls": panel, onclick: () => openTab(name) };
  tabs[name] = el("button", button, name[0].toUpperCase() + name.slice(1));
  panels[name] = el("section", { role: "tabpanel", id: panel, "aria-labelledby": tab, hidden: true });
}
const tablistLabel = { role: "tablist", "aria-label": "Views of the run" };
const tablist = el("div", { ...tablistLabel, onkeydown: onTabKey }, Object.values(tabs));
main.append(title, tablist, ...Object.values(panels));

const curves = makeCurves(panels.curves);
const samples = makeSamples(panels.samples);
const views = { samples, recipe: makeRecipe(panels.recipe), report: makeReport(panels.report) };
const runs = makeRuns(document.getElementById("runs"), chooseRun);

function onTabKey(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move === undefined) return;
  event.preventDefault();
  const next = TABS[(TABS.indexOf(state.tab) + move + TABS.length) % TABS.length];
  openTab(next);
  tabs[next].focus();
}

function chooseRun(run) {
  const other = run !== state.run;
  if (other) {
    // The selected run is replaced; the other shown runs stay.
    state.overlaid = state.overlaid.filter((one) => one !== run);
    state.step = null;
  }
  state.run = run;
  writeAddress(!other);
  open();
}

function openTab(name) {
  state.tab = name;
  writeAddress();
  drawTabs();
  openPanel();
}

function drawTabs() {
  for (const name of TABS) {
    const chosen = name === state.tab;
    tabs[name].setAttribute("aria-selected", String(chosen));
    tabs[name].tabIndex = chosen ? 0 : -1;
    panels[name].hidden = !chosen || state.run === null;
  }
}

function drawTitle() {
  const info = infoOf(state.run);
  if (info === null) {
    const hint = el("p.quiet", "A run appears here when it has written its recipe.");
    title.replaceChildren(el("div.card", el("p", "There are no runs in this folder yet."), hint));
    return;
  }
  const written = info.written ? `written ${ago(Date.now() / 1000 - info.written)}` : null;
  title.replaceChildren(
    el("h1", visible(info.run)),
    info.running ? el("span.badge.good", "running") : "",
    el("p.quiet", visible([info.model, factsOf(info), written].filter(Boolean).join(" · "))),
  );
  document.title = `${info.run} – lockstep view`;
}

/** Shows the chosen run from the beginning. */
function open() {
  runs.draw();
  drawTitle();
  drawTabs();
  tablist.hidden = state.run === null;
  if (state.run === null) return;
  curves.choose();
  openPanel();
}

function openPanel() {
  if (state.run === null) return;
  if (state.tab === "curves") follow();
  else views[state.tab].choose();
}

let following = null;

/** Fetches the curves until all of them are read, then at regular intervals. */
async function follow() {
  clearTimeout(following);
  const active = !document.hidden && state.run !== null && state.tab === "curves";
  const more = active && (await curves.update());
  drawTitle();
  clearTimeout(following);
  following = setTimeout(follow, more ? 20 : 1000 * LIVE_SECONDS);
}

/** Fetches the list of runs at regular intervals, and the shown samples with it. */
async function refreshList() {
  const list = document.hidden ? null : await attempt(() => request("runs"));
  if (list !== null) {
    const first = state.list === null;
    state.list = list;
    if (first) document.getElementById("folder").textContent = list.folder;
    if (infoOf(state.run) === null) {
      readAddress();
      open();
    } else {
      runs.draw();
      drawTitle();
      if (state.tab === "samples" && infoOf(state.run).samples) await samples.update();
    }
  }
  setTimeout(refreshList, 1000 * LIST_SECONDS);
}

const KEYS = [
  ["j / k", "next run, previous run"],
  ["x", "overlay the curves of the focused run, or remove them"],
  ["1 2 3 4", "curves, samples, recipe, report"],
  ["/", "filter or search what is shown"],
  ["f", "filter the runs"],
  ["← →", "previous or next step on a chart and on samples; previous or next token on tokens"],
  ["Enter", "enlarge a chart, or restore its size"],
  ["?", "show these keys"],
];

function makeHelp(dialog) {
  const note =
    "Drag on a chart to zoom into steps; double-click to show all of them. Where a curve has more points than the " +
    "screen, the lowest and the highest of each part are always drawn.";
  dialog.append(
    el("h2", { id: "help-title" }, "Keys"),
    el("dl", definitions(KEYS.map(([key, meaning]) => [el("kbd", key), meaning]))),
    el("p.quiet", note),
    el("button", { type: "button", onclick: () => dialog.close() }, "Close"),
  );
  document.getElementById("help-button").addEventListener("click", () => dialog.showModal());
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || state.list === null) return;
  const typing = event.target.matches?.("select, textarea, input:not([type=checkbox]):not([type=range])");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || document.getElementById("help").open) return;
  const focusedRun = event.target.dataset?.run ?? event.target.dataset?.over;
  const search = { samples: samples.focusSearch, curves: curves.focusFilter }[state.tab] ?? runs.focusFilter;
  const actions = {
    j: () => runs.move(1),
    k: () => runs.move(-1),
    x: () => focusedRun && runs.toggle(focusedRun),
    f: runs.focusFilter,
    "/": search,
    "?": () => document.getElementById("help").showModal(),
    ...Object.fromEntries(TABS.map((name, i) => [String(i + 1), () => openTab(name)])),
  };
  if (state.tab === "samples" && ["ArrowLeft", "ArrowRight"].includes(event.key) && event.target === document.body) {
    samples.stepBy(event.key === "ArrowRight" ? 1 : -1);
  }
  if (actions[event.key] === undefined) return;
  event.preventDefault();
  actions[event.key]();
});

window.addEventListener("popstate", () => {
  if (state.list === null) return;
  readAddress();
  open();
});

makeHelp(document.getElementById("help"));
refreshList();
