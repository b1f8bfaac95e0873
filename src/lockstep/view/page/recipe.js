// The recipe of the chosen run and its environment, and what is different in another run.

function makeRecipe(root) {
  const against = el("select", { id: "against", "aria-label": "Difference to" });
  const difference = el("div", { id: "difference" });
  const whole = el("div", { id: "recipe" });
  const told = new Map();

  root.append(
    el("div", { class: "toolbar" }, el("div", { class: "controls" }, el("label", {}, "Difference to ", against))),
    difference,
    whole,
  );
  against.addEventListener("change", () => {
    state.against = against.value || null;
    writeAddress(true);
    choose();
  });

  async function choose() {
    const others = state.listed.runs.map((one) => one.run).filter((run) => run !== state.run);
    if (state.against !== null && !others.includes(state.against)) state.against = null;
    against.replaceChildren(
      el("option", { value: "" }, "no other run"),
      ...others.map((run) => el("option", { value: run, selected: run === state.against ? "" : null }, run)),
    );
    const runs = [state.run, ...(state.against === null ? [] : [state.against])];
    const answers = await telling(() => Promise.all(runs.map((run) => ask("recipe", { run }))));
    if (answers === null || runs[0] !== state.run) return;
    runs.forEach((run, i) => told.set(run, answers[i]));
    difference.replaceChildren(...(state.against === null ? [] : differences(runs, answers)));
    whole.replaceChildren(...recipeParts(answers[0]));
  }

  return { choose };
}

function differences([ours, theirs], [mine, other]) {
  return [
    ["Recipe", mine.recipe, other.recipe],
    ["Environment", mine.env, other.env],
  ].map(([title, left, right]) => {
    const value = (keys, key) => (Object.hasOwn(keys, key) ? keys[key] : undefined);
    const every = [...new Set([...Object.keys(left), ...Object.keys(right)])];
    const keys = every.filter((key) => value(left, key) !== value(right, key));
    if (keys.length === 0) return el("p", { class: "card quiet" }, `${title}: nothing is different.`);
    const cell = (text) => el(
      "td",
      { class: "value" },
      text === undefined ? el("span", { class: "missing" }, "not set") : visible(text),
    );
    return el(
      "div",
      { class: "card flush" },
      el(
        "div",
        { class: "scroll" },
        el(
          "table",
          { class: "differences" },
          el("caption", {}, title, el("span", { class: "quiet" }, ` ${show(keys.length, "count")} different`)),
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              [el("th", { scope: "col" }, "key"), el("th", { scope: "col" }, ours), el("th", { scope: "col" }, theirs)],
            ),
          ),
          el(
            "tbody",
            {},
            keys.map(
              (key) => el(
                "tr",
                { "data-key": key },
                el("td", {}, el("code", {}, visible(key))),
                cell(value(left, key)),
                cell(value(right, key)),
              ),
            ),
          ),
        ),
      ),
    );
  });
}

function recipeParts(told) {
  const parts = told.problems.map((problem) => el("p", { class: "card warning" }, problem));
  if (told.text !== null) {
    parts.push(
      el(
        "div",
        { class: "card" },
        el("h3", {}, "recipe.yaml"),
        el("pre", { class: "long", tabindex: 0 }, visible(told.text)),
      ),
    );
  } else parts.push(el("p", { class: "card quiet" }, "This run has no recipe.yaml."));
  for (const { last_step: last, text } of told.earlier) {
    parts.push(
      el(
        "details",
        { class: "card" },
        el("summary", {}, `The recipe that held up to step ${show(last, "step")}`),
        el("pre", { class: "long" }, visible(text)),
      ),
    );
  }
  const env = Object.entries(told.env);
  if (env.length > 0) {
    parts.push(
      el(
        "details",
        { class: "card flush environment" },
        el("summary", {}, "Environment", el("span", { class: "quiet" }, ` ${show(env.length, "count")} facts`)),
        el(
          "div",
          { class: "scroll" },
          el(
            "table",
            {},
            el(
              "tbody",
              {},
              env.map(
                ([key, value]) => el(
                  "tr",
                  {},
                  el("td", {}, el("code", {}, visible(key))),
                  el("td", { class: "value" }, visible(value)),
                ),
              ),
            ),
          ),
        ),
      ),
    );
  }
  return parts;
}

function makeReport(root) {
  let shown = null;
  function choose() {
    const info = infoOf(state.run);
    if (shown === state.run && info?.report) return;
    shown = state.run;
    if (!info?.report) {
      root.replaceChildren(
        el(
          "div",
          { class: "card" },
          el("p", {}, "No comparison was written for this run."),
          el("p", { class: "quiet" }, "A comparison puts its report into the folder of its second run:"),
          el("pre", {}, `lockstep compare OTHER_RUN ${state.listed.folder}/${state.run}`),
        ),
      );
      return;
    }
    const address = `${state.listed.reports}?${new URLSearchParams({ run: state.run })}`;
    // A stranger to this page: it runs its own script and can reach nothing.
    root.replaceChildren(
      el(
        "iframe",
        {
          src: address,
          sandbox: "allow-scripts",
          title: `Report of the comparison of ${state.run}`,
          referrerpolicy: "no-referrer",
        },
      ),
    );
  }
  return { choose };
}
