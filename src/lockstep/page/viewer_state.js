// The state of the page, kept in the URL so that links and the back button work, and requests to the server.

const MAX_RUNS = 8;
const TABS = ["curves", "samples", "recipe", "report"];

const state = {
  /** The reply of api/runs: folder, runs, left_out, first, reports. */
  list: null,
  run: null,
  overlaid: [],
  tab: "curves",
  /** The step of the shown samples; null: the last. */
  step: null,
  against: null,
  colors: new Map(),
};

/** The runs with shown curves, the selected one first. */
function shownRuns() {
  return state.run === null ? [] : [state.run, ...state.overlaid.filter((run) => run !== state.run)];
}

/** The number of a run's color. It does not change while the run is shown. */
function colorOf(run) {
  const shown = shownRuns();
  for (const old of [...state.colors.keys()]) if (!shown.includes(old)) state.colors.delete(old);
  for (const name of shown.filter((one) => !state.colors.has(one))) {
    const used = new Set(state.colors.values());
    state.colors.set(name, [...Array(MAX_RUNS).keys()].find((color) => !used.has(color)));
  }
  return state.colors.get(run);
}

const swatch = (run) => el(`i.swatch.s${colorOf(run)}`, { "aria-hidden": "true" });

function infoOf(run) {
  return state.list?.runs.find((info) => info.run === run) ?? null;
}

/** The default: the run that was written last. */
function newestRun() {
  const newest = (best, info) => (best === null || info.written > best.written ? info : best);
  return state.list.runs.reduce(newest, null)?.run ?? null;
}

function readAddress() {
  const params = new URLSearchParams(location.hash.slice(1));
  const exists = (run) => infoOf(run) !== null;
  state.run = exists(params.get("run")) ? params.get("run") : newestRun();
  state.overlaid = params.getAll("with").filter(exists).slice(0, MAX_RUNS - 1);
  state.tab = TABS.includes(params.get("tab")) ? params.get("tab") : "curves";
  state.step = /^-?\d{1,15}$/.test(params.get("step") ?? "") ? Number(params.get("step")) : null;
  state.against = exists(params.get("against")) ? params.get("against") : null;
}

/** `replace` adds no entry to the history: for another step or one more run. */
function writeAddress(replace = false) {
  const params = new URLSearchParams();
  if (state.run !== null) params.set("run", state.run);
  for (const run of shownRuns().slice(1)) params.append("with", run);
  if (state.tab !== "curves") params.set("tab", state.tab);
  if (state.tab === "samples" && state.step !== null) params.set("step", state.step);
  if (state.against !== null) params.set("against", state.against);
  const address = `#${params}`;
  if (address !== location.hash) history[replace ? "replaceState" : "pushState"](null, "", address);
}

/** The reply to a request. A list becomes several parameters, null none. */
async function request(route, values = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const item of [value].flat()) if (given(item) && item !== "") query.append(name, item);
  }
  let response;
  try {
    response = await fetch(`api/${route}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not respond. Was `lockstep view` stopped?");
  }
  const reply = await response.json();
  if (!response.ok) throw new Error(reply.error);
  return reply;
}

function showMessage(text) {
  const message = document.getElementById("message");
  message.textContent = text ?? "";
  message.hidden = !text;
}

/** The result of `work`; null if it fails, and the page shows the error. */
async function attempt(work) {
  try {
    const result = await work();
    showMessage(null);
    return result;
  } catch (error) {
    if (error.name !== "AbortError") showMessage(error.message);
    return null;
  }
}

function ago(seconds) {
  if (seconds < 60) return "just now";
  const [size, unit] = seconds < 3600 ? [60, "min"] : seconds < 86400 ? [3600, "h"] : [86400, "d"];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}
