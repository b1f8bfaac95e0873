// The responses of the chosen run: of one step, or all that a filter finds.

const ENDS = [
  ["", "any end"],
  ["length", "cut at the limit"],
  ["failed", "no score"],
  ["token", "end token"],
  ["string", "stop string"],
];
const KINDS = [
  ["", "all kinds"],
  ["train", "training"],
  ["val", "validation"],
  ["failed", "not scored"],
];

function selectOf(id, label, choices) {
  return el(
    "select",
    { id, "aria-label": label },
    choices.map(([value, text]) => el("option", { value }, text)),
  );
}

function makeSamples(root) {
  const number = el("input", { type: "number", id: "step", step: 1, "aria-label": "Step" });
  const slider = el("input", { type: "range", id: "step-slider", "aria-label": "Step" });
  const before = el("button", { type: "button", id: "step-before", "aria-label": "Step before" }, "‹");
  const after = el("button", { type: "button", id: "step-after", "aria-label": "Next step" }, "›");
  const range = el("span", { class: "quiet" });
  const everywhere = el("input", { type: "checkbox", id: "all-steps" });
  const kind = selectOf("kind", "Kind", KINDS);
  const ended = selectOf("ended", "How it ended", ENDS);
  const least = el("input", { type: "number", id: "least", step: "any", placeholder: "score from", "aria-label": "Least score" });
  const most = el("input", { type: "number", id: "most", step: "any", placeholder: "to", "aria-label": "Greatest score" });
  const text = el("input", { type: "search", id: "sample-text", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses" });
  const colour = selectOf("colour", "Colour of tokens", [
    ["logprob", "by log-prob"],
    ["advantage", "by advantage"],
    ["", "off"],
  ]);
  const key = el("p", { class: "quiet colour-key" });
  const count = el("p", { class: "quiet", id: "sample-count", role: "status" });
  const list = el("div", { id: "sample-list" });
  const more = el("button", { type: "button", id: "more", hidden: "" }, "Show more");
  let asking = null;
  let shown = [];
  let edges = [null, null];

  root.append(
    el(
      "div",
      { class: "card filters" },
      el("div", { class: "controls step-line" }, el("label", {}, "Step ", before, number, after), slider, range, el("label", {}, everywhere, "All steps")),
      el("div", { class: "controls" }, text, kind, ended, el("span", { class: "pair" }, least, most), el("label", {}, "Colour ", colour)),
      key,
    ),
    count,
    list,
    more,
  );

  const step = (value) => {
    if (edges[0] === null) return;
    state.step = Math.max(edges[0], Math.min(edges[1], value));
    everywhere.checked = false;
    writeAddress(true);
    search();
  };
  number.addEventListener("change", () => step(Math.round(Number(number.value))));
  slider.addEventListener("input", () => step(Number(slider.value)));
  before.addEventListener("click", () => beside(-1));
  after.addEventListener("click", () => beside(1));
  for (const control of [kind, ended, everywhere]) control.addEventListener("change", () => search());
  let waiting = null;
  for (const control of [text, least, most]) {
    control.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(search, 200);
    });
  }
  colour.addEventListener("change", () => {
    drawKey();
    list.replaceChildren(...shown.map((sample) => sampleCard(sample)));
  });
  more.addEventListener("click", () => goOn(false));
  list.addEventListener("keydown", (event) => {
    if (event.target.closest(".tokens")) return;
    if (event.key === "ArrowLeft") beside(-1);
    if (event.key === "ArrowRight") beside(1);
  });

  const filters = () => ({ kind: kind.value, ended: ended.value, least: least.value, most: most.value, text: text.value });
  const place = { next: null };

  /** The step before or after that has responses: steps without any are passed over. */
  async function beside(direction) {
    const current = state.step ?? edges[1];
    if (current === null) return;
    if (direction > 0) {
      const told = await telling(() => ask("samples", { run: state.run, from: place.end ?? 0 }));
      const next = told?.samples.find((sample) => sample.step > current)?.step;
      step(next ?? current + 1);
    } else step(current - 1);
  }

  function drawKey() {
    key.replaceChildren(...(colour.value === "" ? [] : ["Tokens ", ...colourLegend(colour.value)]));
  }

  /** Starts anew with the filters as they are. */
  async function search() {
    asking?.abort();
    shown = [];
    place.next = null;
    await goOn(true);
  }

  async function goOn(first) {
    asking = new AbortController();
    const { signal } = asking;
    const wanted = shown.length + 20;
    let begin = first;
    do {
      const all = everywhere.checked;
      const told = await telling(() =>
        ask("samples", { run: state.run, ...filters(), step: all ? null : (state.step ?? edges[1]), from: begin ? null : place.next }, signal),
      );
      if (signal.aborted) return;
      if (told === null) {
        shown = [];
        list.replaceChildren(el("p", { class: "card quiet" }, noSamples()));
        count.textContent = "";
        return;
      }
      if (edges[1] === null && told.last !== null && !all && state.step === null) {
        // Which step is the last one is only known now.
        edges = [told.first, told.last];
        begin = true;
        continue;
      }
      edges = [told.first, told.last];
      place.next = told.next;
      place.end = told.at;
      if (begin) list.replaceChildren();
      shown.push(...told.samples);
      list.append(...told.samples.map((sample) => sampleCard(sample)));
      describe(told);
      begin = false;
    } while (place.next !== null && shown.length < wanted);
    more.hidden = place.next === null;
  }

  function noSamples() {
    return infoOf(state.run)?.samples ? "samples.jsonl cannot be shown." : "This run stored no responses (log.samples; offline methods have none).";
  }

  function describe(told) {
    const at = state.step ?? edges[1];
    const known = told.first !== null;
    for (const control of [number, slider, before, after]) control.disabled = !known;
    if (known) {
      for (const control of [number, slider]) {
        control.min = told.first;
        control.max = told.last;
        if (control !== document.activeElement || control === slider) control.value = at;
      }
      range.textContent = `of ${show(told.first, "step")} to ${show(told.last, "step")}`;
    } else range.textContent = "";
    const searched = told.size === 0 ? 100 : Math.round((100 * told.at) / told.size);
    const where = everywhere.checked ? `${place.next === null ? "in all steps" : `in the first ${searched} % of the file`}` : `in step ${show(at, "step")}`;
    count.textContent = `${show(shown.length, "count")}${place.next === null ? "" : " or more"} responses ${where}`;
  }

  function sampleCard(sample) {
    if (sample.damaged !== undefined) {
      return el("article", { class: "card quiet" }, `A line of ${show(sample.damaged, "count")} bytes at byte ${show(sample.offset, "count")} is no response: damaged, or too long to show.`);
    }
    const card = el("article", { class: "card sample", tabindex: 0, "data-offset": sample.offset });
    card.append(...sampleParts(sample, colour.value));
    if (sample.bytes !== undefined) {
      const button = el("button", { type: "button", class: "whole" }, `Show all of it (${show(sample.bytes, "count")} bytes)`);
      button.addEventListener("click", async () => {
        const told = await telling(() => ask("sample", { run: state.run, offset: sample.offset }));
        if (told !== null) card.replaceChildren(...sampleParts(told, colour.value));
      });
      card.append(button);
    }
    return card;
  }

  function choose() {
    edges = [null, null];
    shown = [];
    drawKey();
    return search();
  }

  /** Where a run goes on, the slider grows; the step that is looked at stays. */
  async function update() {
    const told = await telling(() => ask("samples", { run: state.run, step: state.step ?? edges[1] ?? 0 }));
    if (told === null || told.last === null) return;
    const fresh = edges[1] === null;
    edges = [told.first, told.last];
    if (fresh && shown.length === 0) await search();
    else {
      slider.max = number.max = told.last;
      range.textContent = `of ${show(told.first, "step")} to ${show(told.last, "step")}`;
      if (state.step === null && Number(slider.value) !== told.last && !everywhere.checked) await search();
    }
  }

  return { choose, update, beside, focusSearch: () => text.focus() };
}

/** Why a response ended where it did, in words; null where nothing is to be said. */
function endOf(sample) {
  if (sample.failure !== undefined) return ["bad", `no score: ${visible(String(sample.failure))}`];
  if (sample.stop === "length") return ["noise", `cut at the limit of ${show(sample.tokens, "count")} tokens`];
  return null;
}

function sampleParts(sample, colour) {
  const end = endOf(sample);
  const value = (name, number, style) =>
    typeof number === "number" ? el("span", { class: "pill" }, el("span", { class: "quiet" }, name), " ", el("b", { class: "figure", "data-value": String(number) }, show(number, style))) : null;
  const told = (name, words) => (words === undefined || words === null ? null : el("span", { class: "pill" }, el("span", { class: "quiet" }, name), ` ${visible(String(words))}`));
  const parts = Object.entries(typeof sample.parts === "object" && sample.parts !== null ? sample.parts : {});
  const tokens = colour === "" ? null : tokensOf(sample);
  return [
    el(
      "div",
      { class: "sample-head" },
      el("strong", {}, `step ${show(sample.step, "step")}`),
      told("", sample.kind),
      told("sample", sample.sample),
      typeof sample.score === "number" ? value("score", sample.score) : told("score", sample.score ?? "none"),
      parts.map(([name, part]) => (typeof part === "number" ? value(visible(name), part) : told(visible(name), part))),
      value("advantage", sample.advantage, "signed"),
      value("tokens", sample.tokens, "count"),
      told("ended by", sample.stop),
    ),
    end === null ? null : el("p", { class: `end badge ${end[0]}` }, end[1]),
    el("div", { class: "turns" }, promptTurns(sample.prompt)),
    el("h4", {}, "Response"),
    tokens === null ? el("pre", { class: "response-text" }, visible(String(sample.response ?? ""))) : tokenStrip(sample, tokens, colour),
    tokens === null && colour !== "" ? el("p", { class: "quiet" }, "Nothing is stored of its single tokens.") : null,
    sample.ground_truth === undefined || sample.ground_truth === null
      ? null
      : [el("h4", {}, "Expected"), el("pre", {}, visible(String(sample.ground_truth)))],
    sample.origin === undefined ? null : el("p", { class: "source" }, visible(String(sample.origin))),
  ]
    .flat(Infinity)
    .filter((part) => part !== null);
}

function promptTurns(prompt) {
  const messages = Array.isArray(prompt) ? prompt : [{ role: "prompt", content: prompt }];
  return messages.map((message) => {
    const told = typeof message === "object" && message !== null ? message : { role: "", content: message };
    const content = typeof told.content === "string" ? told.content : JSON.stringify(told.content ?? told, null, 1);
    return [el("h4", {}, visible(String(told.role ?? ""))), el("pre", {}, visible(content ?? ""))];
  });
}
