// The samples of a run: lists, filters, and the tokens of a response colored by log-prob or advantage.

const PROBABILITY_EDGES = [0.9, 0.7, 0.5, 0.3, 0.1, 0.01];
const ADVANTAGE_LEVELS = 4;
const SAMPLES_AT_ONCE = 20;
const STOP_REASONS = [
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
const COLORINGS = [
  ["logprob", "by log-prob"],
  ["advantage", "by advantage"],
  ["", "off"],
];

/** The class of a token by its probability: 0 for a likely one, up to 6 for one that was nearly impossible. */
function probabilityClass(logprob) {
  if (typeof logprob !== "number") return "";
  const level = PROBABILITY_EDGES.findIndex((edge) => Math.exp(logprob) >= edge);
  return `p${level < 0 ? PROBABILITY_EDGES.length : level}`;
}

/** The class of a token by its advantage, relative to the largest of its response. */
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

/** The tokens of a response. The pointer and the arrow keys select one; the line below shows its values. */
function tokenStrip(sample, tokens, coloring, hint = "Point at a token, or select one with the arrow keys.") {
  const largest = Math.max(0, ...tokens.map((token) => Math.abs(token.advantage ?? 0)).filter(Number.isFinite));
  const kind = ({ advantage, logprob }) =>
    coloring === "advantage" ? advantageClass(advantage, largest) : probabilityClass(logprob);
  const spans = tokens.map((token, i) => {
    const classes = `token ${kind(token)}${token.text === "" ? " part" : ""}`;
    return el("span", { class: classes, "data-token": i }, visible(token.text));
  });
  const readout = el("p.readout.quiet", { role: "status" }, hint);
  let selected = -1;
  const select = (i) => {
    spans[selected]?.classList.remove("chosen");
    selected = i;
    spans[i].classList.add("chosen");
    readout.replaceChildren(...tokenWords(tokens[i], i, tokens.length));
  };
  const onpointerover = (event) => {
    const i = event.target.dataset?.token;
    if (i !== undefined) select(Number(i));
  };
  const onkeydown = (event) => {
    const last = spans.length - 1;
    const next = { ArrowRight: selected + 1, ArrowLeft: selected - 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    event.stopPropagation();
    select(Math.max(0, Math.min(last, next)));
    spans[selected].scrollIntoView({ block: "nearest" });
  };
  const label = { tabindex: 0, role: "group", "aria-label": "Tokens of the response; the arrow keys select one" };
  const stored = `${show(tokens.length, "count")} of ${show(sample.tokens, "count")}`;
  return [
    el("pre.tokens", { ...label, onpointerover, onkeydown }, spans),
    sample.tokens > tokens.length && el("p.quiet", `The run stored details of the first ${stored} tokens.`),
    readout,
  ];
}

function tokenWords({ text, logprob, advantage }, i, count) {
  const probability = `  log-prob ${show(logprob)} (${show(100 * Math.exp(logprob), "percent")})`;
  return [
    `token ${show(i + 1, "count")} of ${show(count, "count")} `,
    el("code", JSON.stringify(text)),
    typeof logprob === "number" ? probability : "  written by the environment",
    typeof advantage === "number" ? `  advantage ${show(advantage, "signed")}` : "",
  ];
}

function colorLegend(coloring) {
  const box = (kind, text) => [el(`span.token.key-box.${kind}`), el("span", text)];
  if (coloring === "") return [];
  if (coloring === "advantage") {
    return ["Tokens ", ...box("up4", "raised"), ...box("down4", "lowered"), el("span", "(relative to each response)")];
  }
  const levels = { p0: "90 % or more", p2: "50 to 70 %", p4: "10 to 30 %", p6: "under 1 %" };
  return ["Tokens ", ...Object.entries(levels).flatMap(([kind, text]) => box(kind, text))];
}

function makeSamples(root) {
  let timer = null;
  const searchLater = () => {
    clearTimeout(timer);
    timer = setTimeout(search, 200);
  };
  const input = (id, type, label, attributes) => el("input", { type, id, "aria-label": label, ...attributes });
  const dropdown = (id, label, choices, onchange) =>
    el("select", { id, "aria-label": label, onchange }, choices.map(([value, text]) => el("option", { value }, text)));
  const arrow = (id, label, direction, text) =>
    el("button", { type: "button", id, "aria-label": label, onclick: () => stepBy(direction) }, text);
  const typed = () => setStep(Math.round(Number(number.value)));
  const number = input("step", "number", "Step", { step: 1, onchange: typed });
  const slider = input("step-slider", "range", "Step", { oninput: () => setStep(Number(slider.value)) });
  const before = arrow("step-before", "Step before", -1, "‹");
  const after = arrow("step-after", "Next step", 1, "›");
  const range = el("span.quiet");
  const allSteps = el("input", { type: "checkbox", id: "all-steps", onchange: search });
  const kind = dropdown("kind", "Kind", KINDS, search);
  const ended = dropdown("ended", "Stop reason", STOP_REASONS, search);
  const [least, most] = [["least", "≥", "Minimum score"], ["most", "≤", "Maximum score"]].map(([id, sign, label]) =>
    input(id, "number", label, { step: "any", placeholder: `score ${sign}`, oninput: searchLater }),
  );
  const searchLabel = "Search prompts and responses";
  const text = input("sample-text", "search", searchLabel, { placeholder: searchLabel, oninput: searchLater });
  const coloring = dropdown("colour", "Color of tokens", COLORINGS, applyColoring);
  const key = el("p.quiet.color-key");
  const count = el("p.quiet", { id: "sample-count", role: "status" });
  const list = el("div", { id: "sample-list", onkeydown: onKey });
  const more = el("button", { type: "button", id: "more", hidden: true, onclick: fetchMore }, "Show more");
  /** The position in the file, and the neighboring steps with samples, as the server reported them. */
  const position = { next: null, before: null, after: null, last: null };
  let abort = null;
  let shown = [];

  const stepControls = el("span.pair", el("label", { for: "step" }, "Step"), before, number, after);
  root.append(
    el(
      "div.card.filters",
      el("div.controls.step-line", stepControls, slider, range, el("label", allSteps, "All steps")),
      el("div.controls", text, kind, ended, el("span.pair", least, most), el("label", "Color ", coloring)),
      key,
    ),
    count,
    list,
    more,
  );

  function setStep(step) {
    state.step = step;
    allSteps.checked = false;
    writeAddress(true);
    search();
  }

  /** Shows the previous or the next step that has responses. */
  function stepBy(direction) {
    const next = direction > 0 ? position.after : position.before;
    if (next !== null) setStep(next);
  }

  function onKey(event) {
    if (event.target.closest(".tokens")) return;
    if (event.key === "ArrowLeft") stepBy(-1);
    if (event.key === "ArrowRight") stepBy(1);
  }

  function applyColoring() {
    key.replaceChildren(...colorLegend(coloring.value));
    list.replaceChildren(...shown.map(sampleCard));
  }

  /** Starts again with the current filters. */
  async function search() {
    abort?.abort();
    abort = new AbortController();
    shown = [];
    position.next = null;
    if (infoOf(state.run)?.samples) await fetchMore();
    else showNone("This run stored no responses (log.samples; offline methods have none).");
  }

  /** Fetches until some more responses are found, or all of them are. */
  async function fetchMore() {
    const { signal } = abort;
    const wanted = shown.length + SAMPLES_AT_ONCE;
    const filters = { kind: kind.value, ended: ended.value, least: least.value, most: most.value, text: text.value };
    do {
      const step = allSteps.checked ? "all" : (state.step ?? "last");
      const query = { run: state.run, ...filters, step, from: position.next };
      const reply = await attempt(() => request("samples", query, signal));
      if (signal.aborted) return;
      if (reply === null) return showNone("The responses of this run cannot be shown.");
      if (shown.length === 0) list.replaceChildren();
      const { next, before: previous = null, after: following = null, last } = reply;
      Object.assign(position, { next, before: previous, after: following, last });
      shown.push(...reply.samples);
      list.append(...reply.samples.map(sampleCard));
      describe(reply);
    } while (position.next !== null && shown.length < wanted);
    more.hidden = position.next === null;
  }

  function showNone(reason) {
    list.replaceChildren(el("p.card.quiet", reason));
    count.textContent = "";
    more.hidden = true;
  }

  const rangeText = ({ first, last }) => `of ${show(first, "count")} to ${show(last, "count")}`;

  function describe(reply) {
    const some = reply.first !== null && reply.last !== null;
    for (const control of [number, slider]) {
      control.disabled = !some;
      if (some) Object.assign(control, { min: reply.first, max: reply.last });
      if (some && reply.step !== undefined) control.value = reply.step;
    }
    before.disabled = position.before === null;
    after.disabled = position.after === null;
    range.textContent = some ? rangeText(reply) : "";
    const searched = reply.size === 0 ? 100 : Math.floor((100 * reply.at) / reply.size);
    const part = position.next === null ? "in all steps" : `in the first ${searched} % of the file`;
    const where = allSteps.checked ? part : `in step ${show(reply.step, "count")}`;
    count.textContent = `${plural(shown.length, "response")}${position.next === null ? "" : " so far"} ${where}`;
  }

  function sampleCard(sample) {
    if (sample.damaged !== undefined) {
      const line = `A line of ${show(sample.damaged, "count")} bytes at byte ${show(sample.offset, "count")}`;
      return el("article.card.quiet", `${line} is no response: it is damaged or too long to show.`);
    }
    const card = el("article.card.sample", { tabindex: 0, "data-offset": sample.offset });
    const fetchAll = async () => {
      const full = await attempt(() => request("sample", { run: state.run, offset: sample.offset }));
      if (full !== null) card.replaceChildren(...sampleParts(full, coloring.value));
    };
    card.append(...sampleParts(sample, coloring.value));
    const label = `Show all of it (${show(sample.bytes, "count")} bytes)`;
    if (sample.bytes !== undefined) card.append(el("button.show-all", { type: "button", onclick: fetchAll }, label));
    return card;
  }

  function choose() {
    key.replaceChildren(...colorLegend(coloring.value));
    return search();
  }

  /** Extends the slider when the run grows. The shown step stays, unless it was the last. */
  async function update() {
    if (allSteps.checked) return;
    const reply = await attempt(() => request("samples", { run: state.run, step: "last", kind: "none" }));
    if (reply === null || reply.last === position.last) return;
    if (state.step === null) {
      await search();
      return;
    }
    position.last = slider.max = number.max = reply.last;
    range.textContent = rangeText(reply);
    position.after ??= reply.last;
    after.disabled = false;
  }

  return { choose, update, stepBy, focusSearch: () => text.focus() };
}

/** The badge of a response without a score or without an end; null for others. */
function endBadge(sample) {
  if (sample.failure !== undefined) return el("p.end.badge.bad", `no score: ${visible(String(sample.failure))}`);
  if (sample.stop !== "length") return null;
  return el("p.end.badge.noise", `cut at the limit of ${show(sample.tokens, "count")} tokens`);
}

function sampleParts(sample, coloring) {
  const pill = (name, content) => el("span.pill", el("span.quiet", name), " ", content);
  const field = (name, value, style) => {
    if (value === undefined || value === null) return null;
    if (typeof value !== "number") return pill(name, visible(String(value)));
    return pill(name, el("b.figure", { "data-value": String(value) }, show(value, style)));
  };
  const parts = typeof sample.parts === "object" && sample.parts !== null ? Object.entries(sample.parts) : [];
  const tokens = coloring === "" ? null : tokensOf(sample);
  return [
    el(
      "div.sample-head",
      el("strong", `step ${show(sample.step, "count")}`),
      field("", sample.kind),
      given(sample.sample) && field("sample", String(sample.sample)),
      field("score", sample.score ?? "none"),
      parts.map(([name, value]) => field(visible(name), value)),
      typeof sample.advantage === "number" && field("advantage", sample.advantage, "signed"),
      typeof sample.tokens === "number" && field("tokens", sample.tokens, "count"),
      field("ended by", sample.environment_stop ?? sample.stop),
    ),
    endBadge(sample),
    Array.isArray(sample.conversation)
      ? el("div.conversation", conversationParts(sample, tokens, coloring))
      : [
          el("div.turns", promptTurns(sample.prompt)),
          promptImages(sample.images),
          el("h4", "Response"),
          tokens === null
            ? el("pre.response-text", visible(String(sample.response ?? "")))
            : tokenStrip(sample, tokens, coloring),
        ],
    tokens === null && coloring !== "" && el("p.quiet", "The run stored no details of its tokens."),
    given(sample.ground_truth) && [el("h4", "Expected"), el("pre", visible(String(sample.ground_truth)))],
    sample.origin !== undefined && el("p.source", visible(String(sample.origin))),
  ]
    .flat(Infinity)
    .filter(given);
}

/** A conversation with an environment, by speaker. The tokens of the model's turns are trained, with their rewards. */
function conversationParts(sample, tokens, coloring) {
  const turns = Array.isArray(sample.turns) ? sample.turns : [];
  const several = sample.conversation.some((entry) => entry?.row > 0);
  return sample.conversation.map((entry) => {
    const message = typeof entry === "object" && entry !== null ? entry : { content: entry };
    const row = several && given(message.row) ? `row ${show(message.row + 1, "count")}, ` : "";
    const turn = turns[message.turn];
    const calls = Array.isArray(message.tool_calls) ? JSON.stringify(message.tool_calls, null, 1) : "";
    const content = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "");
    const text = [message.reasoning_content, content, calls].filter((part) => given(part) && part !== "").join("\n");
    if (turn === undefined) {
      const speaker = visible(String(message.name ?? message.role ?? ""));
      return el("section.speaker", el("h4", row + speaker), el("pre", visible(text)));
    }
    const own = tokens !== null && turn.stop <= tokens.length ? tokens.slice(turn.start, turn.stop) : null;
    const reward = el("span.pill", el("span.quiet", "reward"), " ", el("b.figure", show(turn.reward, "signed")));
    const length = `${plural(turn.stop - turn.start, "trained token")}${turn.finish === "length" ? ", cut" : ""}`;
    return el(
      "section.speaker.model",
      el("h4", `${row}model, turn ${show(message.turn + 1, "count")}, `, el("span.quiet", length), " ", reward),
      own === null
        ? el("pre.response-text", visible(text))
        : tokenStrip({ ...sample, tokens: own.length }, own, coloring, message.turn === 0 ? undefined : ""),
      given(turn.parse_error) && el("p.end.badge.bad", visible(String(turn.parse_error))),
    );
  });
}

/** The images of the prompt, in the order of their placeholders. */
function promptImages(images) {
  if (!Array.isArray(images)) return null;
  return images.map((image, index) => {
    const query = new URLSearchParams({ run: state.run, file: String(image?.file) });
    const caption = `image ${index + 1}: ${show(image?.tokens, "count")} tokens from token ${show(image?.start, "count")}`;
    return el("figure.image", el("img", { src: `api/image?${query}`, alt: caption }), el("figcaption", caption));
  });
}

function promptTurns(prompt) {
  if (!given(prompt)) return el("p.quiet", "The run did not store the prompt.");
  const messages = Array.isArray(prompt) ? prompt : [{ role: "prompt", content: prompt }];
  return messages.map((message) => {
    const turn = typeof message === "object" && message !== null ? message : { role: "", content: message };
    const content = typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content ?? turn, null, 1);
    return [el("h4", visible(String(turn.role ?? ""))), el("pre", visible(content ?? ""))];
  });
}
