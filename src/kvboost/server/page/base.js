"use strict";
// What all parts of the page share: elements, numbers, the server. Text gets into the page as text nodes only.

const KINDS = ["exact", "continued", "moved", "repaired", "fresh"];
const MEANING = {
  exact: "same history: the very rows that were computed",
  continued: "same history, built on moved text: served as kept",
  moved: "same text elsewhere: keys rotated to the new position",
  repaired: "moved text whose rows were computed again",
  fresh: "new text: computed",
};
const NOTHING = "–";

// --- elements ---

const $ = (id) => document.getElementById(id);

/** An element with attributes (null ones are left out) and children; strings become text. */
function make(name, attributes, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** The same for SVG. */
function draw(name, attributes, ...children) {
  return furnish(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function furnish(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** A table of cells: a cell is text, an element, or {n: text} for a number. Without rows, a sentence instead. */
function table(caption, head, rows, otherwise) {
  if (!rows.length) return make("p", { class: "dim" }, otherwise);
  const cell = (content, name, attributes) => {
    const number = content?.constructor === Object;
    return make(name, { ...attributes, class: number ? "n" : null }, number ? content.n : content);
  };
  const line = (row) => make("tr", null, ...row.map((c, i) => (i ? cell(c, "td") : cell(c, "th", { scope: "row" }))));
  return make("div", { class: "scroll" },
    make("table", null,
      make("caption", { class: "unseen" }, caption),
      make("thead", null, make("tr", null, ...head.map((c) => cell(c, "th", { scope: "col" })))),
      make("tbody", null, ...rows.map(line))));
}

/** A bar of parts: [class, amount] each; `all` is the whole, by default their sum. */
function bar(parts, { all, size = "", label = null } = {}) {
  const whole = all || parts.reduce((sum, [, amount]) => sum + amount, 0);
  const told = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  const made = make("div", { class: `bar ${size}`, ...told });
  for (const [kind, amount] of parts) {
    if (amount <= 0 || !whole) continue;
    const part = make("i", { class: kind });
    part.style.width = `${Math.min(100, (100 * amount) / whole)}%`;
    made.append(part);
  }
  return made;
}

/** The sign of a kind, and a name beside it. */
function kindCell(kind, name = kind) {
  return make("span", { class: "kind" }, make("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), name);
}

const shown = new Map();

/** Puts what `render` makes of `data` into an element, unless it stands there already. */
function show(id, data, render) {
  const key = JSON.stringify(data);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  const made = render(data);
  $(id).replaceChildren(...(Array.isArray(made) ? made : [made]));
}

/** Tells those who listen rather than look. */
function say(text) {
  $("said").textContent = text;
}

// --- numbers ---

const wholeNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (n) => (n === null || n === undefined ? NOTHING : wholeNumber.format(n));
const signed = (n) => (n < 0 ? `−${count(-n)}` : `+${count(n)}`);
const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many}`;

function share(part, all) {
  if (!all) return NOTHING;
  const percent = (100 * part) / all;
  return percent > 0 && percent < 0.1 ? "<0.1 %" : `${percent.toFixed(1)} %`;
}

function seconds(s) {
  if (s === null || s === undefined) return NOTHING;
  if (s < 0.9995) return `${(1000 * s).toPrecision(3)} ms`;
  return s < 99.95 ? `${s.toPrecision(3)} s` : `${count(s)} s`;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = n, unit = 0;
  while (value >= 1023.5 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit === 0 || value >= 999.5 ? count(value) : value.toPrecision(3)} ${units[unit]}`;
}

function age(s) {
  if (s === null || s === undefined) return NOTHING;
  if (s < 60) return `${Math.max(0, Math.round(s))} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const clock = (date) => date.toLocaleTimeString("en-GB");

// --- the server ---

/** The token: in this tab only, and gone with it. Where the browser keeps nothing, until the page is left. */
const token = {
  name: "kvboost-admin-token",
  kept: null,
  get() {
    try { this.kept = sessionStorage.getItem(this.name) ?? this.kept; } catch { /* no storage */ }
    return this.kept;
  },
  set(value) {
    this.kept = value;
    try {
      if (value === null) sessionStorage.removeItem(this.name);
      else sessionStorage.setItem(this.name, value);
    } catch { /* no storage */ }
  },
};
const tokenNeeded = document.documentElement.dataset.token === "needed";
const mayAsk = () => !tokenNeeded || token.get() !== null;

/** The server could not be asked. */
class Unreached extends Error {}

/** The server answered, and said no. */
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The JSON at a path beside this page; with a body it is posted. Throws `Unreached` or `Refused`. */
async function ask(path, { body, patience_ms = 120000, as = token.get() } = {}) {
  const headers = {};
  if (as !== null) headers.Authorization = `Bearer ${asHeader(as)}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(patience_ms),
  }).catch((error) => {
    throw new Unreached(error.name === "TimeoutError" ? "it did not answer in time" : "it cannot be reached");
  });
  const told = await answer.json().catch(() => null);
  if (answer.ok && told === null) throw new Unreached("its answer was cut off");
  if (!answer.ok) throw new Refused(answer.status, told?.error?.message ?? `the server answered with ${answer.status}`);
  return told;
}

/** UTF-8 bytes as the characters that a header can carry. */
const asHeader = (text) => Array.from(new TextEncoder().encode(text), (b) => String.fromCharCode(b)).join("");

/** Why something failed, in a sentence. */
function sentence(error) {
  return error instanceof Unreached ? `No news from the server: ${error.message}.` : `${error.message.replace(/\.$/, "")}.`;
}
