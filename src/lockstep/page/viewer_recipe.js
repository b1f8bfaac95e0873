// Recipe, environment and report of the selected run, and the differences from another run.

function makeRecipe(root) {
  const against = el("select", { id: "against", "aria-label": "Difference to", onchange: select });
  const difference = el("div", { id: "difference" });
  const recipe = el("div", { id: "recipe" });
  let requested = null;

  root.append(el("div.toolbar", el("div.controls", el("label", "Difference to ", against))), difference, recipe);

  function select() {
    state.against = against.value || null;
    writeAddress(true);
    choose();
  }

  async function choose() {
    const others = state.list.runs.map((info) => info.run).filter((run) => run !== state.run);
    if (!others.includes(state.against)) state.against = null;
    const option = (run) => el("option", { value: run, selected: run === state.against }, visible(run));
    against.replaceChildren(el("option", { value: "" }, "no other run"), ...others.map(option));
    const runs = [state.run, state.against].filter(given);
    const current = () => JSON.stringify(runs) === JSON.stringify([state.run, state.against].filter(given));
    const recipes = await attempt(() => Promise.all(runs.map((run) => request("recipe", { run }))));
    if (recipes === null || !current()) return;
    recipe.replaceChildren(...recipeParts(recipes[0]));
    const pair = JSON.stringify(runs);
    if (runs.length === 1) difference.replaceChildren();
    else if (requested !== pair) difference.replaceChildren(el("p.card.quiet", "Comparing …"));
    requested = pair;
    if (runs.length === 1) return;
    const reply = await attempt(() => request("difference", { run: runs[0], against: runs[1] }));
    if (reply !== null && current()) difference.replaceChildren(...differenceParts(runs, recipes, reply));
  }

  return { choose };
}

/** Differences by their effect on curves, as in a comparison's report. A damaged recipe is compared key by key. */
function differenceParts(runs, [left, right], reply) {
  const problem = visible(`The effects are unknown: ${reply.problem}`);
  const parts =
    reply.problem === undefined
      ? weightedParts(runs, reply)
      : [el("p.card.warning", problem), plainDifferences("Recipe", runs, left.recipe, right.recipe)];
  const title = "All environment differences";
  const environment = plainDifferences("Environment", runs, left.env, right.env);
  return [...parts, environment && folded(title, environment)].filter(given);
}

const folded = (title, ...content) => el("details.fold", el("summary", title), content);

function weightedParts(runs, { differences, unknown }) {
  const relevant = differences.filter(({ weight }) => weight !== "harmless");
  const harmless = differences.filter(({ weight }) => weight === "harmless");
  const count = `${show(relevant.length, "count")} that may change a curve`;
  const more = `${show(harmless.length, "count")} more, which do not change the curves`;
  return [
    relevant.length > 0
      ? differenceTable("Differences", count, runs, relevant)
      : el("p.card.quiet", { id: "no-difference" }, "No difference that may change a curve."),
    harmless.length > 0 ? folded(more, differenceTable("Harmless", "", runs, harmless)) : null,
    unknown.length > 0 ? folded("Unknown", el("ul", unknown.map((text) => el("li", visible(text))))) : null,
  ];
}

/** A table of the keys with different values; null if there are none. */
function plainDifferences(title, runs, left, right) {
  const value = (side, key) => (Object.hasOwn(side, key) ? side[key] : null);
  const rows = [...new Set([...Object.keys(left), ...Object.keys(right)])]
    .map((key) => ({ key, a: value(left, key), b: value(right, key) }))
    .filter((row) => row.a !== row.b);
  return rows.length === 0 ? null : differenceTable(title, `${show(rows.length, "count")} different`, runs, rows);
}

function differenceTable(title, count, runs, rows) {
  const weights = rows.some((row) => row.weight !== undefined);
  const head = [...(weights ? ["weight"] : []), "key", ...runs].map(visible);
  const cell = (text, run) =>
    el("td.value", { "data-of": visible(run) }, text === null ? el("span.missing", "not set") : visible(text));
  const row = ({ key, weight, effect, a, b }) =>
    el(
      "tr",
      { "data-key": key },
      weights && el("td", weightBadge(weight)),
      el("td", el("code", visible(key)), weights && el("div.effect", visible(effect))),
      [cell(a, runs[0]), cell(b, runs[1])],
    );
  const caption = el("caption", title, el("span.quiet", ` ${count}`));
  return tableCard(weights ? "differences weighed" : "differences", head, rows.map(row), caption);
}

function recipeParts({ problems, text, earlier, env }) {
  const file = (content) => el("pre.long", { tabindex: 0 }, visible(content));
  const facts = Object.entries(env);
  const row = ([key, value]) => el("tr", el("td", el("code", visible(key))), el("td.value", visible(value)));
  const table = el("div.scroll", el("table", el("tbody", facts.map(row))));
  const summary = el("summary", "Environment", el("span.quiet", ` ${show(facts.length, "count")} facts`));
  return [
    ...problems.map((problem) => el("p.card.warning", problem)),
    text === null
      ? el("p.card.quiet", "This run has no recipe.yaml.")
      : el("div.card", el("h3", "recipe.yaml"), file(text)),
    ...earlier.map((old) =>
      el("details.card", el("summary", `The recipe until step ${show(old.last_step, "count")}`), file(old.text)),
    ),
    facts.length > 0 ? el("details.card.flush.environment", summary, table) : "",
  ];
}

function makeReport(root) {
  let shown = null;
  function choose() {
    const written = infoOf(state.run)?.report;
    if (shown === state.run && written) return;
    shown = state.run;
    const query = new URLSearchParams({ run: state.run });
    // Sandboxed: the report runs its script without access to this page or the network.
    const sandbox = { sandbox: "allow-scripts", referrerpolicy: "no-referrer" };
    const title = `Report of the comparison of ${state.run}`;
    root.replaceChildren(
      written
        ? el("iframe", { src: `${state.list.reports}?${query}`, title, ...sandbox })
        : el(
            "div.card",
            el("p", "This run has no comparison report."),
            el("p.quiet", "A comparison writes its report to the folder of its second run:"),
            el("pre", `lockstep compare OTHER_RUN ${state.list.folder}/${state.run}`),
          ),
    );
  }
  return { choose };
}
