// The state of the page, kept in the URL so that links and the back button work, and requests to the server.

const MOST_RUNS = 8;
const TABS = ["curves", "samples", "recipe", "report"];

const state = {
  /** The reply of api/runs: folder, runs, left_out, first, reports. */
  listed: null,
  run: null,
  beside: [],
  tab: "curves",
  /** The step of the shown samples; null: the last. */
  step: null,
  against: null,
  slots: new Map(),
};

/** The runs with shown curves, the selected one first. */
function shownRuns() {
  return state.run === null ? [] : [state.run, ...state.beside.filter((run) => run !== state.run)];
}

/** The color of a run. It does not change while the run is shown. */
function slotOf(run) {
  const shown = shownRuns();
  for (const known of [...state.slots.keys()]) if (!shown.includes(known)) state.slots.delete(known);
  for (const one of shown) {
    if (state.slots.has(one)) continue;
    const taken = new Set(state.slots.values());
    state.slots.set(
      one,
      [...Array(MOST_RUNS).keys()].find((slot) => !taken.has(slot)),
    );
  }
  return state.slots.get(run);
}

function swatch(run) {
  return el("i", { class: `swatch s${slotOf(run)}`, "aria-hidden": "true" });
}

function infoOf(run) {
  return state.listed?.runs.find((one) => one.run === run) ?? null;
}

/** The default: the run that was written last. */
function newestRun() {
  const newest = (best, one) => (best === null || one.written > best.written ? one : best);
  return state.listed.runs.reduce(newest, null)?.run ?? null;
}

function readAddress() {
  const told = new URLSearchParams(location.hash.slice(1));
  const known = (run) => infoOf(run) !== null;
  const run = told.get("run");
  state.run = run !== null && known(run) ? run : newestRun();
  state.beside = told
    .getAll("with")
    .filter(known)
    .slice(0, MOST_RUNS - 1);
  state.tab = TABS.includes(told.get("tab")) ? told.get("tab") : "curves";
  state.step = /^-?\d{1,15}$/.test(told.get("step") ?? "") ? Number(told.get("step")) : null;
  state.against = known(told.get("against")) ? told.get("against") : null;
}

/** `replace` adds no entry to the history: for another step or one more run. */
function writeAddress(replace = false) {
  const told = new URLSearchParams();
  if (state.run !== null) told.set("run", state.run);
  for (const run of shownRuns().slice(1)) told.append("with", run);
  if (state.tab !== "curves") told.set("tab", state.tab);
  if (state.tab === "samples" && state.step !== null) told.set("step", state.step);
  if (state.against !== null) told.set("against", state.against);
  const address = `#${told}`;
  if (address === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", address);
}

/** A request to the server. A list becomes several parameters, null none. */
async function ask(question, values = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  let answer;
  try {
    answer = await fetch(`api/${question}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: was `lockstep view` stopped?");
  }
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
}

function say(text) {
  const message = document.getElementById("message");
  message.textContent = text ?? "";
  message.hidden = !text;
}

/** Runs work that may fail without a server or a file, and shows the error. */
async function telling(work) {
  try {
    const result = await work();
    say(null);
    return result;
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
    return null;
  }
}

function ago(seconds) {
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}
