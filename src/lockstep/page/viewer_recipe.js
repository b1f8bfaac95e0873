// Recipe and environment of the selected run, and the differences from another run.

function makeRecipe(root) {
  const against = el("select", { id: "against", "aria-label": "Difference to" });
  const difference = el("div", { id: "difference" });
  const whole = el("div", { id: "recipe" });
  let weighing = null;

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
      ...others.map((run) => el("option", { value: run, selected: run === state.against ? "" : null }, visible(run))),
    );
    const [run, other] = [state.run, state.against];
    const answers = await telling(() =>
      Promise.all([ask("recipe", { run }), ...(other === null ? [] : [ask("recipe", { run: other })])]),
    );
    if (answers === null || run !== state.run || other !== state.against) return;
    whole.replaceChildren(...recipeParts(answers[0]));
    if (other === null) {
      difference.replaceChildren();
      weighing = null;
      return;
    }
    if (weighing !== `${run}\n${other}`) difference.replaceChildren(el("p", { class: "card quiet" }, "Weighing …"));
    weighing = `${run}\n${other}`;
    const found = await telling(() => ask("difference", { run, against: other }));
    if (found === null || run !== state.run || other !== state.against) return;
    // What cannot be weighed is shown all the same.
    const parts = found.problem === undefined
      ? weighed([run, other], found)
      : [
          el("p", { class: "card warning" }, visible(`Not weighed: ${found.problem}`)),
          ...unlike("Recipe", [run, other], answers[0].recipe, answers[1].recipe),
        ];
    const facts = unlike("Environment", [run, other], answers[0].env, answers[1].env);
    if (facts.length > 0) {
      const title = "Every fact of the environment that is different";
      parts.push(el("details", { class: "fold" }, el("summary", {}, title), facts));
    }
    difference.replaceChildren(...parts);
  }

  return { choose };
}

const WEIGHTS = { blocks: "bad", matters: "noise", harmless: "quiet" };

/** Differences by their effect on curves, as in a comparison's report; harmless ones are collapsed. */
function weighed(runs, { differences, unknown }) {
  const told = differences.filter((one) => one.weight !== "harmless");
  const harmless = differences.filter((one) => one.weight === "harmless");
  const parts = [];
  if (told.length > 0) {
    const title = `${show(told.length, "count")} that may change a curve`;
    parts.push(differenceTable("Differences", title, runs, told));
  } else {
    const none = "Nothing is different that may change a curve.";
    parts.push(el("p", { class: "card quiet", id: "no-difference" }, none));
  }
  if (harmless.length > 0) {
    const title = `${show(harmless.length, "count")} more, which must not change the curves`;
    parts.push(
      el("details", { class: "fold" }, el("summary", {}, title), differenceTable("Harmless", "", runs, harmless)),
    );
  }
  if (unknown.length > 0) {
    const list = unknown.map((one) => el("li", {}, visible(one)));
    parts.push(el("details", { class: "fold" }, el("summary", {}, "What a run does not tell"), el("ul", {}, list)));
  }
  return parts;
}

/** Plain, by key. */
function unlike(title, runs, left, right) {
  const value = (keys, key) => (Object.hasOwn(keys, key) ? keys[key] : null);
  const keys = [...new Set([...Object.keys(left), ...Object.keys(right)])];
  const rows = keys
    .map((key) => ({ key, a: value(left, key), b: value(right, key) }))
    .filter((one) => one.a !== one.b);
  return rows.length === 0 ? [] : [differenceTable(title, `${show(rows.length, "count")} different`, runs, rows)];
}

function differenceTable(title, count, runs, rows) {
  const weights = rows.some((one) => one.weight !== undefined);
  const head = [...(weights ? ["weight"] : []), "key", ...runs];
  const cell = (text, run) => el(
    "td",
    { class: "value", "data-of": visible(run) },
    text === null ? el("span", { class: "missing" }, "not set") : visible(text),
  );
  return el(
    "div",
    { class: "card flush" },
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: weights ? "differences weighed" : "differences" },
        el("caption", {}, title, el("span", { class: "quiet" }, ` ${count}`)),
        el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, visible(name))))),
        el(
          "tbody",
          {},
          rows.map(
            (one) => el(
              "tr",
              { "data-key": one.key },
              weights ? el("td", {}, el("span", { class: `badge ${WEIGHTS[one.weight]}` }, one.weight)) : null,
              el(
                "td",
                {},
                el("code", {}, visible(one.key)),
                weights ? el("div", { class: "effect" }, visible(one.effect)) : null,
              ),
              cell(one.a, runs[0]),
              cell(one.b, runs[1]),
            ),
          ),
        ),
      ),
    ),
  );
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
    // Sandboxed: the report runs its script without access to this page or the network.
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
