// A response token by token, coloured by log-prob or by advantage, with a line that tells of the one under the pointer.

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

/** What is known of each token; null where the run did not store it. */
function tokensOf(sample) {
  const details = sample.token_details;
  if (typeof details !== "object" || details === null || !Array.isArray(details.texts)) return null;
  const list = (value) => (Array.isArray(value) ? value : []);
  return details.texts.map((text, i) => ({
    text: String(text),
    logprob: list(details.logprobs)[i],
    // Where tokens do not differ in it, the response tells it once.
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
