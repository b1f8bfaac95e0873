// The list of runs: one is chosen, others are laid over its curves.

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
