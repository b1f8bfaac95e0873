// The list of runs, the tabs and the keyboard: the frame of the run viewer.

function makeRuns(root, choose) {
  const filter = el(
    "input",
    { type: "search", id: "run-filter", placeholder: "Filter runs", "aria-label": "Filter runs" },
  );
  const list = el("ul", { class: "run-list" });
  const left = el("p", { class: "quiet left-out", hidden: "" });
  const folded = el(
    "details",
    { class: "run-fold", open: "" },
    el("summary", {}, "Runs ", el("span", { class: "quiet", id: "run-count" })),
    filter,
    list,
    left,
  );
  root.append(folded);
  let inView = null;
  filter.addEventListener("input", draw);
  const narrow = matchMedia("(max-width: 860px)");
  if (narrow.matches) folded.open = false;
  narrow.addEventListener("change", () => {
    folded.open = !narrow.matches;
  });

  const wanted = () => {
    const text = filter.value.trim().toLowerCase();
    return state.listed.runs.filter(
      (one) => [one.run, one.method ?? "", one.model ?? ""].some((words) => words.toLowerCase().includes(text)),
    );
  };

  function toggle(run) {
    if (run === state.run) return;
    if (state.beside.includes(run)) state.beside = state.beside.filter((one) => one !== run);
    else if (shownRuns().length < MOST_RUNS) state.beside = [...state.beside, run];
    else say(`At most ${MOST_RUNS} runs are laid over each other.`);
    choose(state.run);
  }

  function entry(one) {
    const chosen = one.run === state.run;
    const over = chosen || state.beside.includes(one.run);
    const box = el(
      "input",
      { type: "checkbox", "aria-label": `Lay the curves of ${one.run} over the others`, "data-over": one.run },
    );
    box.checked = over;
    box.disabled = chosen;
    box.addEventListener("change", () => toggle(one.run));
    const button = el(
      "button",
      { type: "button", class: "run-name", "data-run": one.run, "aria-current": chosen ? "true" : null },
      el("span", { class: "run-title" }, visible(one.run), one.running ? el("span", { class: "running" }, "running") : null),
      el("span", { class: "quiet run-facts" }, factsOf(one)),
    );
    button.addEventListener("click", () => choose(one.run));
    return el(
      "li",
      { class: chosen ? "chosen" : null },
      el("span", { class: "over" }, box, over ? swatch(one.run) : null),
      button,
    );
  }

  function draw() {
    const focused = document.activeElement?.dataset;
    const place = ["run", "over"].find((name) => focused?.[name] !== undefined);
    const again = place === undefined ? null : `[data-${place}=${CSS.escape(focused[place])}]`;
    const keep = again !== null && list.contains(document.activeElement);
    const runs = wanted();
    list.replaceChildren(...runs.map(entry));
    const none = state.listed.runs.length === 0 ? "No runs here yet." : "No run matches.";
    if (runs.length === 0) list.append(el("li", { class: "quiet none" }, none));
    if (keep) list.querySelector(again)?.focus();
    document.getElementById("run-count").textContent = show(state.listed.runs.length, "count");
    left.hidden = state.listed.left_out.length === 0;
    const { left_out: others } = state.listed;
    left.textContent = visible(`Left out: ${others.slice(0, 5).join("; ")}${others.length > 5 ? " …" : ""}`);
    // Once for each choice: a reader who scrolls the list is left alone.
    if (inView !== state.run) bringIntoView(list.querySelector(".chosen"), narrow.matches ? list : root);
    inView = state.run;
  }

  /** Not `scrollIntoView`, which moves the page too. */
  function bringIntoView(chosen, box) {
    if (chosen === null) return;
    const [own, around] = [chosen.getBoundingClientRect(), box.getBoundingClientRect()];
    const bottom = Math.min(around.bottom, innerHeight);
    if (own.top >= around.top && own.bottom <= bottom) return;
    box.scrollTop += own.top - (around.top + bottom) / 2;
  }

  /** The run `places` further down the list. */
  function move(places) {
    const runs = wanted().map((one) => one.run);
    if (runs.length === 0) return;
    const at = runs.indexOf(state.run);
    choose(runs[Math.max(0, Math.min(runs.length - 1, at < 0 ? 0 : at + places))]);
  }

  function focusFilter() {
    folded.open = true;
    filter.focus();
  }

  return { draw, move, toggle, focusFilter };
}

function factsOf(one) {
  const planned = Number.isInteger(one.steps) ? ` of ${show(one.steps, "step")}` : "";
  const steps = Number.isInteger(one.step) ? `step ${show(one.step, "step")}${planned}` : "no step yet";
  const value = typeof one.value === "number" ? `${one.metric} ${show(one.value)}` : null;
  return visible([one.problem, one.method, steps, value].filter((fact) => fact).join(" · "));
}

const LIVE_SECONDS = 1.5;
const LIST_SECONDS = 5;

const main = document.getElementById("main");
const title = el("div", { class: "run-head" });
const tablist = el("div", { role: "tablist", "aria-label": "What to look at" });
const panels = {};
const tabs = {};
for (const name of TABS) {
  tabs[name] = el(
    "button",
    { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` },
    name[0].toUpperCase() + name.slice(1),
  );
  panels[name] = el("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, hidden: "" });
  tabs[name].addEventListener("click", () => openTab(name));
}
tablist.append(...Object.values(tabs));
tablist.addEventListener("keydown", (event) => {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move === undefined) return;
  event.preventDefault();
  const next = TABS[(TABS.indexOf(state.tab) + move + TABS.length) % TABS.length];
  openTab(next);
  tabs[next].focus();
});
main.append(title, tablist, ...Object.values(panels));

const curves = makeCurves(panels.curves);
const samples = makeSamples(panels.samples);
const recipe = makeRecipe(panels.recipe);
const report = makeReport(panels.report);
const runs = makeRuns(document.getElementById("runs"), chooseRun);

function chooseRun(run) {
  const other = run !== state.run;
  if (other) {
    // The selected run is replaced; the other shown runs stay.
    state.beside = state.beside.filter((one) => one !== run);
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
    title.replaceChildren(
      el(
        "div",
        { class: "card" },
        el("p", {}, "There are no runs in this folder yet."),
        el("p", { class: "quiet" }, "A run appears here when it has written its recipe."),
      ),
    );
    return;
  }
  const now = Date.now() / 1000;
  const facts = [info.model, factsOf(info), info.written ? `written ${ago(now - info.written)}` : null];
  title.replaceChildren(
    el("h1", {}, visible(info.run)),
    ...(info.running ? [el("span", { class: "badge good" }, "running")] : []),
    el("p", { class: "quiet" }, visible(facts.filter((part) => part).join(" · "))),
  );
  document.title = `${info.run} – lockstep view`;
}

/** Shows the chosen run from the beginning. */
function open() {
  runs.draw();
  drawTitle();
  drawTabs();
  const some = state.run !== null;
  tablist.hidden = !some;
  if (!some) return;
  curves.choose();
  openPanel();
}

function openPanel() {
  if (state.run === null) return;
  if (state.tab === "curves") follow();
  else if (state.tab === "samples") samples.choose();
  else if (state.tab === "recipe") recipe.choose();
  else report.choose();
}

let following = null;

/** Asks for more of the curves until all of it is read, then at every tick of the clock. */
async function follow() {
  clearTimeout(following);
  const more = document.hidden || state.run === null || state.tab !== "curves" ? false : await curves.update();
  drawTitle();
  clearTimeout(following);
  following = setTimeout(follow, more ? 20 : 1000 * LIVE_SECONDS);
}

async function look() {
  if (!document.hidden) {
    const told = await telling(() => ask("runs"));
    if (told !== null) {
      const before = state.run;
      state.listed = told;
      if (before === null || infoOf(before) === null) {
        readAddress();
        open();
      } else {
        runs.draw();
        drawTitle();
        if (state.tab === "samples" && infoOf(before).samples) await samples.update();
      }
    }
  }
  setTimeout(look, 1000 * LIST_SECONDS);
}

const KEYS = [
  ["j / k", "next run, run before"],
  ["x", "lay the run under the focus over the curves, or take it away"],
  ["1 2 3 4", "curves, samples, recipe, report"],
  ["/", "filter or search what is shown"],
  ["f", "filter the runs"],
  ["← →", "on a chart: the step before or after; on samples: the step; on tokens: the token"],
  ["Enter", "on a chart: larger, and back"],
  ["?", "these keys"],
];

function makeHelp(dialog) {
  const close = el("button", { type: "button" }, "Close");
  close.addEventListener("click", () => dialog.close());
  dialog.append(
    el("h2", { id: "help-title" }, "Keys"),
    el("dl", {}, KEYS.map(([key, meaning]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)))),
    el(
      "p",
      { class: "quiet" },
      "Drag over a chart to zoom into steps, double click to see all of them. ",
      "Where a curve has more points than the screen, the lowest and the highest of each part are always drawn.",
    ),
    close,
  );
  document.getElementById("help-button").addEventListener("click", () => dialog.showModal());
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || state.listed === null) return;
  const typing = event.target.matches?.("select, textarea, input:not([type=checkbox]):not([type=range])");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || document.getElementById("help").open) return;
  const focusedRun = event.target.dataset?.run ?? event.target.dataset?.over;
  const actions = {
    j: () => runs.move(1),
    k: () => runs.move(-1),
    x: () => focusedRun && runs.toggle(focusedRun),
    f: () => runs.focusFilter(),
    "/": () => {
      if (state.tab === "samples") samples.focusSearch();
      else if (state.tab === "curves") curves.focusFilter();
      else runs.focusFilter();
    },
    "?": () => document.getElementById("help").showModal(),
    ...Object.fromEntries(TABS.map((name, i) => [String(i + 1), () => openTab(name)])),
  };
  if (state.tab === "samples" && ["ArrowLeft", "ArrowRight"].includes(event.key) && event.target === document.body) {
    samples.beside(event.key === "ArrowRight" ? 1 : -1);
  }
  if (actions[event.key] === undefined) return;
  event.preventDefault();
  actions[event.key]();
});

window.addEventListener("popstate", () => {
  if (state.listed === null) return;
  readAddress();
  open();
});

makeHelp(document.getElementById("help"));
(async () => {
  const told = await telling(() => ask("runs"));
  if (told !== null) {
    state.listed = told;
    document.getElementById("folder").textContent = told.folder;
    readAddress();
    open();
  }
  setTimeout(look, 1000 * LIST_SECONDS);
})();
