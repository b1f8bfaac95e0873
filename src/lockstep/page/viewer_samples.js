// The samples of a run: lists, filters, and the tokens of a response colored by log-prob or advantage.

const PROBABILITY_EDGES = [0.9, 0.7, 0.5, 0.3, 0.1, 0.01];
const ADVANTAGE_LEVELS = 4;

/** The class of a token by its probability: 0 for a sure one, up to 6 for one that was nearly impossible. */
function probabilityClass(logprob) {
  if (typeof logprob !== "number") return "";
  const probability = Math.exp(logprob);
  const level = PROBABILITY_EDGES.findIndex((edge) => probability >= edge);
  return `p${level < 0 ? PROBABILITY_EDGES.length : level}`;
}

/** The class of a token by its advantage, in the scale of its response. */
function advantageClass(advantage, largest) {
  if (typeof advantage !== "number" || advantage === 0 || !(largest > 0)) return "";
  const level = Math.max(1, Math.ceil((Math.abs(advantage) / largest) * ADVANTAGE_LEVELS));
  return `${advantage > 0 ? "up" : "down"}${level}`;
}

/** The details of each token; null if the run did not store them. */
function tokensOf(sample) {
  const details = sample.token_details;
  if (typeof details !== "object" || details === null || !Array.isArray(details.texts)) return null;
  const list = (value) => (Array.isArray(value) ? value : []);
  return details.texts.map((text, i) => ({
    text: String(text),
    logprob: list(details.logprobs)[i],
    // If all tokens have the same advantage, it is stored once per response.
    advantage: details.advantages === undefined ? sample.advantage : list(details.advantages)[i],
  }));
}

function tokenStrip(sample, tokens, colour) {
  const largest = Math.max(0, ...tokens.map((token) => Math.abs(token.advantage ?? 0)).filter(Number.isFinite));
  const kind = (token) => (
    colour === "advantage" ? advantageClass(token.advantage, largest) : probabilityClass(token.logprob)
  );
  const spans = tokens.map((token, i) => {
    const span = el(
      "span",
      { class: `token ${kind(token)}`, "data-token": i },
      visible(token.text),
    );
    if (token.text === "") span.classList.add("part");
    return span;
  });
  const strip = el(
    "pre",
    { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens of the response; arrow keys go through them" },
    spans,
  );
  const readout = el(
    "p",
    { class: "readout quiet", role: "status" },
    "Point at a token, or go through them with the arrow keys.",
  );
  let chosen = -1;
  const tell = (i) => {
    spans[chosen]?.classList.remove("chosen");
    chosen = i;
    spans[i].classList.add("chosen");
    readout.replaceChildren(...tokenWords(tokens[i], i, tokens.length));
  };
  strip.addEventListener("pointerover", (event) => {
    const place = event.target.dataset?.token;
    if (place !== undefined) tell(Number(place));
  });
  strip.addEventListener("keydown", (event) => {
    const next = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (next === undefined || spans.length === 0) return;
    event.preventDefault();
    event.stopPropagation();
    tell(Math.max(0, Math.min(spans.length - 1, next)));
    spans[chosen].scrollIntoView({ block: "nearest" });
  });
  const rest = sample.tokens - tokens.length;
  const known = `${show(tokens.length, "count")} of ${show(sample.tokens, "count")}`;
  return [
    strip,
    rest > 0 ? el("p", { class: "quiet" }, `The run stored what it knows of the first ${known} tokens.`) : null,
    readout,
  ];
}

function tokenWords(token, i, count) {
  const words = [
    `token ${show(i + 1, "count")} of ${show(count, "count")} `,
    el("code", {}, JSON.stringify(token.text)),
  ];
  if (typeof token.logprob === "number") {
    words.push(`  log-prob ${show(token.logprob)} (${show(100 * Math.exp(token.logprob), "percent")})`);
  } else words.push("  written by the environment");
  if (typeof token.advantage === "number") words.push(`  advantage ${show(token.advantage, "signed")}`);
  return words;
}

function colourLegend(colour) {
  const box = (kind, text) => [el("span", { class: `token key-box ${kind}` }), el("span", {}, text)];
  if (colour === "advantage") {
    return [...box("up4", "raised"), ...box("down4", "lowered"), el("span", {}, "(in the scale of each response)")];
  }
  return [...box("p0", "sure"), ...box("p2", "50 to 70 %"), ...box("p4", "10 to 30 %"), ...box("p6", "under 1 %")];
}

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

const SAMPLES_AT_ONCE = 20;

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
  const least = el(
    "input",
    { type: "number", id: "least", step: "any", placeholder: "score ≥", "aria-label": "Least score" },
  );
  const most = el(
    "input",
    { type: "number", id: "most", step: "any", placeholder: "score ≤", "aria-label": "Greatest score" },
  );
  const text = el(
    "input",
    {
      type: "search",
      id: "sample-text",
      placeholder: "Search prompts and responses",
      "aria-label": "Search prompts and responses",
    },
  );
  const colour = selectOf("colour", "Colour of tokens", [
    ["logprob", "by log-prob"],
    ["advantage", "by advantage"],
    ["", "off"],
  ]);
  const key = el("p", { class: "quiet colour-key" });
  const count = el("p", { class: "quiet", id: "sample-count", role: "status" });
  const list = el("div", { id: "sample-list" });
  const more = el("button", { type: "button", id: "more", hidden: "" }, "Show more");
  const place = { next: null, before: null, after: null, last: null };
  let asking = null;
  let shown = [];

  root.append(
    el(
      "div",
      { class: "card filters" },
      el(
        "div",
        { class: "controls step-line" },
        el("span", { class: "pair" }, el("label", { for: "step" }, "Step"), before, number, after),
        slider,
        range,
        el("label", {}, everywhere, "All steps"),
      ),
      el(
        "div",
        { class: "controls" },
        text,
        kind,
        ended,
        el("span", { class: "pair" }, least, most),
        el("label", {}, "Colour ", colour),
      ),
      key,
    ),
    count,
    list,
    more,
  );

  const step = (value) => {
    state.step = value;
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
  more.addEventListener("click", () => goOn());
  list.addEventListener("keydown", (event) => {
    if (event.target.closest(".tokens")) return;
    if (event.key === "ArrowLeft") beside(-1);
    if (event.key === "ArrowRight") beside(1);
  });

  const filters = () => ({
    kind: kind.value,
    ended: ended.value,
    least: least.value,
    most: most.value,
    text: text.value,
  });

  /** The step before or after that has responses. */
  function beside(direction) {
    const next = direction > 0 ? place.after : place.before;
    if (next !== null) step(next);
  }

  function drawKey() {
    key.replaceChildren(...(colour.value === "" ? [] : ["Tokens ", ...colourLegend(colour.value)]));
  }

  /** Starts anew with the filters as they are. */
  async function search() {
    asking?.abort();
    asking = new AbortController();
    shown = [];
    place.next = null;
    if (infoOf(state.run)?.samples) await goOn();
    else nothing();
  }

  /** Asks on until some more responses are found, or all of them are. */
  async function goOn() {
    const { signal } = asking;
    const wanted = shown.length + SAMPLES_AT_ONCE;
    do {
      const step = everywhere.checked ? "all" : (state.step ?? "last");
      const told = await telling(
        () => ask("samples", { run: state.run, ...filters(), step, from: place.next }, signal),
      );
      if (signal.aborted) return;
      if (told === null) return nothing();
      const fresh = shown.length === 0;
      Object.assign(
        place,
        { next: told.next, at: told.step, before: told.before ?? null, after: told.after ?? null, last: told.last },
      );
      shown.push(...told.samples);
      const cards = told.samples.map((sample) => sampleCard(sample));
      if (fresh) list.replaceChildren(...cards);
      else list.append(...cards);
      describe(told);
    } while (place.next !== null && shown.length < wanted);
    more.hidden = place.next === null;
  }

  function nothing() {
    list.replaceChildren(el("p", { class: "card quiet" }, noSamples()));
    count.textContent = "";
    more.hidden = true;
  }

  function noSamples() {
    if (infoOf(state.run)?.samples) return "The responses of this run cannot be shown.";
    return "This run stored no responses (log.samples; offline methods have none).";
  }

  function describe(told) {
    const known = told.first !== null && told.last !== null;
    for (const control of [number, slider]) {
      control.disabled = !known;
      if (!known) continue;
      control.min = told.first;
      control.max = told.last;
      if (told.step !== undefined) control.value = told.step;
    }
    before.disabled = place.before === null;
    after.disabled = place.after === null;
    range.textContent = known ? `of ${show(told.first, "step")} to ${show(told.last, "step")}` : "";
    const searched = told.size === 0 ? 100 : Math.floor((100 * told.at) / told.size);
    const share = place.next === null ? "in all steps" : `in the first ${searched} % of the file`;
    const where = everywhere.checked ? share : `in step ${show(told.step, "step")}`;
    const found = shown.length === 1 ? "1 response" : `${show(shown.length, "count")} responses`;
    count.textContent = `${found}${place.next === null ? "" : " so far"} ${where}`;
  }

  function sampleCard(sample) {
    if (sample.damaged !== undefined) {
      return el(
        "article",
        { class: "card quiet" },
        `A line of ${show(sample.damaged, "count")} bytes at byte ${show(sample.offset, "count")} is no response: `,
        "damaged, or too long to show.",
      );
    }
    const card = el("article", { class: "card sample", tabindex: 0, "data-offset": sample.offset });
    card.append(...sampleParts(sample, colour.value));
    if (sample.bytes !== undefined) {
      const button = el(
        "button",
        { type: "button", class: "whole" },
        `Show all of it (${show(sample.bytes, "count")} bytes)`,
      );
      button.addEventListener("click", async () => {
        const told = await telling(() => ask("sample", { run: state.run, offset: sample.offset }));
        if (told !== null) card.replaceChildren(...sampleParts(told, colour.value));
      });
      card.append(button);
    }
    return card;
  }

  function choose() {
    drawKey();
    return search();
  }

  /** When the run grows, the slider does too. The shown step stays, unless it was the last. */
  async function update() {
    if (everywhere.checked) return;
    const told = await telling(() => ask("samples", { run: state.run, step: "last", kind: "none" }));
    if (told === null || told.last === place.last) return;
    if (state.step === null) await search();
    else {
      place.last = told.last;
      slider.max = number.max = told.last;
      range.textContent = `of ${show(told.first, "step")} to ${show(told.last, "step")}`;
      if (place.after === null) place.after = told.last;
      after.disabled = false;
    }
  }

  return { choose, update, beside, focusSearch: () => text.focus() };
}

/** Why a response ended, as text; null for a normal end. */
function endOf(sample) {
  if (sample.failure !== undefined) return ["bad", `no score: ${visible(String(sample.failure))}`];
  if (sample.stop === "length") return ["noise", `cut at the limit of ${show(sample.tokens, "count")} tokens`];
  return null;
}

function sampleParts(sample, colour) {
  const end = endOf(sample);
  const pill = (name, content) => el("span", { class: "pill" }, el("span", { class: "quiet" }, name), " ", content);
  const value = (name, number, style) =>
    typeof number === "number"
      ? pill(name, el("b", { class: "figure", "data-value": String(number) }, show(number, style)))
      : null;
  const told = (name, words) => (words === undefined || words === null ? null : pill(name, visible(String(words))));
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
    tokens === null
      ? el("pre", { class: "response-text" }, visible(String(sample.response ?? "")))
      : tokenStrip(sample, tokens, colour),
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
  if (prompt === undefined || prompt === null) return el("p", { class: "quiet" }, "Its prompt is not stored.");
  const messages = Array.isArray(prompt) ? prompt : [{ role: "prompt", content: prompt }];
  return messages.map((message) => {
    const told = typeof message === "object" && message !== null ? message : { role: "", content: message };
    const content = typeof told.content === "string" ? told.content : JSON.stringify(told.content ?? told, null, 1);
    return [el("h4", {}, visible(String(told.role ?? ""))), el("pre", {}, visible(content ?? ""))];
  });
}
