// The X-ray: a prompt is asked for or picked, then drawn as runs of tokens of one kind, chunk by chunk.

const BADGE = { exact: "E", continued: "C", moved: "M", fresh: "F" };
const JUMP = 10; // chunks per PageUp and PageDown
const xray = { result: null, parts: [], at: 0 };

// --- asking ---

async function lookAtPasted(event) {
  event.preventDefault();
  await asked($("look"), async () => {
    const prompt = pasted();
    showXray(await ask("admin/xray", { body: prompt }), "the pasted prompt");
  });
}

/** The body of the question. Throws an `Error` that says what is wrong with what was pasted. */
function pasted() {
  const text = $("prompt").value;
  if (!text.trim()) throw new Error("paste a prompt first");
  const whose = { namespace: $("namespace").value || null, session: $("session").value || null };
  return $("ask").elements.form.value === "text" ? { text, ...whose } : { messages: messagesOf(text), ...whose };
}

function messagesOf(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`this is no JSON: ${error.message}`);
  }
  const messages = Array.isArray(given) ? given : given?.messages;
  if (!Array.isArray(messages) || !messages.length) {
    throw new Error('a chat is a list such as [{"role": "user", "content": "..."}], or an object with such "messages"');
  }
  return messages;
}

async function lookAtKept(id, button) {
  await asked(button, async () => {
    const result = await ask(`admin/requests/${encodeURIComponent(id)}`);
    $("namespace").value = result.namespace;
    $("session").value = result.session;
    showXray(result, `request ${id}`);
  });
}

/** Does `work` for a button, once at a time; a failure is told below the form. The button keeps the focus. */
async function asked(button, work) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true");
  $("ask-error").textContent = "";
  $("prompt").removeAttribute("aria-invalid");
  try {
    await work();
  } catch (error) {
    if (expelled(error)) return;
    $("ask-error").textContent = sentence(error);
    if (button === $("look")) $("prompt").setAttribute("aria-invalid", "true");
  } finally {
    button.setAttribute("aria-disabled", "false");
  }
}

async function listKept() {
  const off = "None are kept. The server keeps the last N prompts if it is started with ";
  await asked($("refresh"), async () => {
    const kept = await ask("admin/requests");
    const none = make("p", { class: "dim" }, off, make("code", null, "--keep-requests N"), ".");
    $("kept").replaceChildren(kept.capacity ? keptTable(kept) : none);
  });
}

function keptTable({ requests, now_s }) {
  const row = (seen) => {
    const pick = make("button", { type: "button" }, seen.request_id);
    pick.addEventListener("click", () => lookAtKept(seen.request_id, pick));
    const tokens = tokensOf(seen);
    const split = bar(KINDS.map((kind) => [kind, tokens[kind]]), { size: "small", label: inWords(tokens) });
    return [pick, split, { n: count(seen.prompt_tokens) }, { n: seconds(seen.ttft_s) }, { n: age(now_s - seen.at_s) }];
  };
  const head = ["request", "sources", { n: "tokens" }, { n: "first token" }, { n: "ago" }];
  return table("Kept requests, the latest first", head, requests.map(row), "No request has been answered since the start.");
}

const tokensOf = (seen) => ({
  exact: seen.exact_tokens, continued: seen.continued_tokens, moved: seen.moved_tokens - seen.repaired_tokens,
  repaired: seen.repaired_tokens, fresh: seen.fresh_tokens,
});

// --- drawing ---

function showXray(result, title) {
  xray.result = result;
  xray.parts = partsOf(result);
  xray.at = 0;
  $("result").hidden = false;
  $("h-result").textContent = `X-ray of ${title}`;
  $("about").textContent = aboutOf(result);
  $("cost").replaceChildren(...costOf(result));
  $("counts").replaceChildren(countsOf(result));
  $("strip").replaceChildren(...bar(runsOf(result.tokens).map((run) => [run.kind, run.length])).children);
  $("map").replaceChildren(...xray.parts.map(chunkOf));
  $("segments").replaceChildren(segmentsOf());
  select(0);
  say(`X-ray of ${title}: ${inWords(result.counts)}`);
  $("h-result").focus();
}

/** The segments, each with its tokens as runs. */
function partsOf({ segments, tokens }) {
  return segments.map((segment, index) => {
    const runs = runsOf(tokens.slice(segment.start, segment.stop));
    const repaired = runs.reduce((sum, run) => sum + (run.kind === "repaired" ? run.length : 0), 0);
    return { ...segment, index, runs, repaired, length: segment.stop - segment.start };
  });
}

/** Tokens joined to runs of one kind: a long prompt has thousands of tokens, and few runs. */
function runsOf(tokens) {
  const runs = [];
  for (const { text, kind } of tokens) {
    const last = runs[runs.length - 1];
    if (last?.kind === kind) {
      last.text += text;
      last.length += 1;
    } else runs.push({ kind, text, length: 1 });
  }
  return runs;
}

function aboutOf({ request_id, at_s, ttft_s, risk, fallback }) {
  if (request_id === undefined) {
    return "As a request would be planned now. Which rows of moved text are repaired is decided while it runs.";
  }
  const when = new Date(1000 * at_s).toLocaleString("sv");
  return [
    `As it was answered on ${when}, first token after ${seconds(ttft_s)}. Ages and hits are those of now.`,
    risk === null ? "" : `Estimated error ${risk.toPrecision(2)} nat per token.`,
    fallback ? `Not (wholly) served by the cache: ${fallback}.` : "",
  ].filter(Boolean).join(" ");
}

function costOf({ cost, counts }) {
  const line = (name, parts, n, s) => [
    make("span", null, name), bar(parts, { all: cost.full_tokens }),
    make("span", { class: "n" }, `${count(n)} tokens${s === null ? "" : `, ≈ ${seconds(s)}`}`),
  ];
  const repaired = cost.repaired_tokens;
  const computed = [["repaired", repaired], ["used", counts.fresh]];
  const times = (cost.full_tokens / Math.max(1, cost.computed_tokens)).toFixed(1);
  const about = cost.repaired_is_estimated ? "about " : "";
  return [
    make("div", { class: "meters" },
      ...line("full prefill", [["used", cost.full_tokens]], cost.full_tokens, cost.full_prefill_s),
      ...line("with the cache", computed, cost.computed_tokens, cost.computed_s)),
    make("p", null, "A full prefill would compute ", make("strong", null, `${times} times`), " as many tokens. ",
      `Computed here: ${count(counts.fresh)} fresh, ${about}${count(repaired)} repaired.`),
    make("p", { class: "key dim" }, cost.full_prefill_s === null
      ? "No times: nothing of this prompt is kept, so what a token costs is not known."
      : "≈ Tokens, times what the kept chunks took per token when they were computed; without looking up and loading."),
  ];
}

function countsOf({ counts, num_tokens }) {
  const row = (kind) => [
    kindCell(kind), { n: count(counts[kind]) }, { n: share(counts[kind], num_tokens) },
    make("small", null, MEANING[kind]),
  ];
  return table("Tokens by kind", ["kind", { n: "tokens" }, { n: "share" }, "meaning"], KINDS.map(row));
}

function chunkOf(part) {
  const badge = BADGE[part.kind] + (part.kind === "moved" ? signed(part.shift) : "");
  const first = part.runs.map((run) => run.text).join("").trim().slice(0, 60);
  const label = `Chunk ${part.index + 1} of ${xray.parts.length}: ${describe(part)}. It begins: ${first}`;
  return make("span",
    { class: "seg", role: "option", tabindex: "-1", "aria-selected": "false", "data-badge": badge, "aria-label": label },
    ...part.runs.map((run) => make("span", { class: `t ${run.kind}` }, run.text)));
}

/** Kind, place, source, age, hits and tier of a chunk in a sentence. */
function describe(part) {
  const where = `${part.kind}, tokens ${count(part.start)} to ${count(part.stop - 1)} (${count(part.length)})`;
  if (part.kind === "fresh") return `${where}: computed for this prompt`;
  const moved = part.kind === "moved" ? `, moved by ${signed(part.shift)}` : ", not moved";
  const repaired = part.repaired ? `, ${count(part.repaired)} computed again` : "";
  return `${where}: computed at position ${count(part.source_position)}${moved}${repaired}; ${stateOf(part)}`;
}

function stateOf(part) {
  if (part.tier === null) return "not kept any more";
  const hits = part.hits === null ? "hits not counted" : plural(part.hits, "hit", "hits");
  return `${part.age_s === null ? "age not known" : `${age(part.age_s)} old`}, ${hits}, in ${part.tier}`;
}

function segmentsOf() {
  const reusedCells = (p) => [
    { n: count(p.source_position) }, { n: p.kind === "moved" ? signed(p.shift) : "0" },
    { n: p.tier === null ? "gone" : age(p.age_s) }, { n: count(p.hits) }, p.tier ?? NOTHING, lineageOf(p),
  ];
  const row = (p) => [
    count(p.index + 1), kindCell(p.kind), { n: count(p.start) }, { n: count(p.length) },
    { n: p.repaired ? count(p.repaired) : "" }, ...(p.kind === "fresh" ? Array(6).fill("") : reusedCells(p)),
  ];
  const head = ["#", "kind", { n: "from token" }, { n: "tokens" }, { n: "repaired" }, { n: "was at" }, { n: "moved by" },
    { n: "age" }, { n: "hits" }, "tier", "lineage"];
  const made = table("Chunks of the prompt", head, xray.parts.map(row)).firstChild;
  const rows = made.tBodies[0].rows;
  made.tBodies[0].addEventListener("click", (event) => select([...rows].indexOf(event.target.closest("tr")), true));
  return made;
}

function lineageOf({ lineage, codec }) {
  const packed = codec && codec !== "none" ? `, ${codec}` : "";
  return lineage ? lineage.replace("_", "-") + packed : NOTHING;
}

// --- moving between chunks: one stop of the Tab key, arrows inside ---

function select(index, focus = false) {
  const [chunks, rows] = [$("map").children, $("segments").querySelector("tbody").rows];
  if (!chunks[index]) return;
  chunks[xray.at]?.setAttribute("tabindex", "-1");
  chunks[xray.at]?.setAttribute("aria-selected", "false");
  rows[xray.at]?.classList.remove("current");
  xray.at = index;
  chunks[index].setAttribute("tabindex", "0");
  chunks[index].setAttribute("aria-selected", "true");
  rows[index].classList.add("current");
  $("segments").scrollTop = rows[index].offsetTop - $("segments").clientHeight / 2;
  $("detail").textContent = `${count(index + 1)} of ${count(chunks.length)}: ${describe(xray.parts[index])}.`;
  if (!focus) return;
  chunks[index].focus();
  chunks[index].scrollIntoView({ block: "nearest" });
}

function moveInMap(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const last = xray.parts.length - 1;
  const target = {
    ArrowRight: xray.at + 1, ArrowDown: xray.at + 1, ArrowLeft: xray.at - 1, ArrowUp: xray.at - 1,
    PageDown: xray.at + JUMP, PageUp: xray.at - JUMP, Home: 0, End: last,
  }[event.key];
  if (target === undefined) return;
  event.preventDefault();
  select(Math.max(0, Math.min(last, target)), true);
}

function copyText() {
  $("prompt").value = xray.result.tokens.map(({ text }) => text).join("");
  $("ask").elements.form.value = "text";
  $("prompt").focus();
  say("The text stands in the box above.");
}

function setUpXray() {
  $("ask").addEventListener("submit", lookAtPasted);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("refresh").addEventListener("click", listKept);
  $("copy").addEventListener("click", copyText);
  $("map").addEventListener("keydown", moveInMap);
  for (const kind of ["click", "focusin"]) {
    $("map").addEventListener(kind, (event) => {
      const chunk = event.target.closest(".seg");
      if (chunk) select([...$("map").children].indexOf(chunk), kind === "click");
    });
  }
}
