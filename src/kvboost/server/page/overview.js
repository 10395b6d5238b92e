// The overview: what GET admin/overview tells, as figures, bars, a chart and tables.

const SPANS_S = [60, 120, 300, 600]; // of the chart: the shortest that holds all requests
const EVICTED = {
  importance_low: "least worth keeping",
  quota: "over a quota",
  ttl: "unused for too long",
  oom: "memory was short",
  invalidated: "deleted",
};

function showOverview(seen) {
  $("model").textContent = `${seen.model} · ${seen.version}`;
  show("alerts", alertsOf(seen), (alerts) => alerts.map(alertLine));
  show("tiles", tilesOf(seen), (tiles) => tiles.map(tile));
  showFirstTokens(seen.recent);
  show("sources", [seen.recent, seen.prompt_tokens].map((x) => x.tokens ?? x), sources);
  show("tiers", [seen.cache.tiers, seen.cache.pending_bytes], tiers);
  show("served", [seen.cache.chunk_hits, seen.cache.repaired], served);
  show("evictions", seen.cache.tiers, evictions);
  show("outcomes", seen.service, outcomes);
  show("fallbacks", seen.cache.fallbacks, fallbacks);
  show("shadow", [seen.cache.shadow, seen.settings], shadow);
  show("settings", seen.settings, settings);
}

const alertLine = ([bad, text]) => make("p", { class: bad ? "alert bad" : "alert" }, text);

/** What an administrator should know before any number: [is it bad, sentence]. */
function alertsOf({ settings, support, cache, service }) {
  const value = (name) => settings.values?.[name]?.value;
  const by = (name) => `(${name}, from: ${settings.values[name].origin})`;
  const offBecause = (name) => `The cache is switched off ${by(name)}. Every prompt is computed in full.`;
  return [
    settings.error && [true, `No settings are in force: ${settings.error}`],
    (value("disable") || value("mode") === "off") && [true, offBecause(value("disable") ? "disable" : "mode")],
    value("mode") === "observe" && [false, `Only observing ${by("mode")}: hits are counted, nothing is served.`],
    value("enabled_share") < 1 && [false, `Not all requests use the cache ${by("enabled_share")}: see the settings.`],
    cache.shadow.suspended && [true, `Moved text is not served: ${cache.shadow.suspended}.`],
    settings.last_error && [true, `The settings file is not in force: ${settings.last_error}`],
    settings.needs_restart.length && [false, `The file wants a restart for: ${settings.needs_restart.join(", ")}.`],
    support.refused && [true, `Nothing is reused for this model: ${support.refused}`],
    support.moved_refused && [false, `Only exact prefixes are reused for this model: ${support.moved_refused}`],
    service?.draining && [false, "The server is shutting down: it takes no more requests."],
  ].filter(Boolean);
}

// --- figures ---

function tilesOf({ recent, prompt_tokens, cache, service, settings }) {
  const first = Object.values(cache.tiers)[0];
  const asked = recent.requests ? plural(recent.requests, "request", "requests") : "no request";
  const running = service ? `${service.prefilling + service.decoding} / ${service.slots}` : NOTHING;
  const limit = first.bytes_limit ? `${share(first.bytes_used, first.bytes_limit)} of ${bytes(first.bytes_limit)}` : "no limit";
  const error = cache.shadow.kl_p95;
  return [
    ["First token, median", seconds(recent.ttft_p50_s), `${asked} in ${minutes(recent.window_s)}`],
    ["First token, p95", seconds(recent.ttft_p95_s), `slowest ${seconds(recent.ttft_max_s)}`],
    ["From the cache", fromCache(recent.tokens), `since the start ${fromCache(prompt_tokens)}`],
    ["Running", running, service ? `${count(service.queued)} waiting` : "no server in front"],
    ["Memory", bytes(first.bytes_used), limit],
    ["Measured error, p95", error === null ? NOTHING : error.toPrecision(2),
      error === null ? "not checked" : `nat; bound ${settings.bound ?? NOTHING}`],
  ];
}

function tile([name, value, more]) {
  return make("div", null, make("dt", null, name), make("dd", { class: "value" }, value), make("dd", { class: "more" }, more));
}

const total = (tokens) => KINDS.reduce((sum, kind) => sum + tokens[kind], 0);
const fromCache = (tokens) => share(tokens.exact + tokens.continued + tokens.moved, total(tokens));
const minutes = (s) => `${Math.round(s / 60)} min`;

// --- time to first token ---

function showFirstTokens(recent) {
  $("ttft-window").textContent = `last ${minutes(recent.window_s)}, at most ${count(recent.at_most)} requests`;
  const width = Math.max(240, $("ttft").clientWidth);
  const none = "No request has been answered in this time.";
  const drawn = () => (recent.points.length ? firstTokens(recent, width) : make("p", { class: "dim" }, none));
  show("ttft", [recent.points, width], drawn);
}

/** A dot per request: when it ended, and how long its first token took, on a logarithmic scale. */
function firstTokens(recent, width, height = 176) {
  const [left, right, top, bottom] = [52, 8, 10, 22];
  const times = recent.points.map((p) => Math.max(p.ttft_s, 1e-4));
  const [low, high] = [Math.floor(Math.log10(Math.min(...times))), Math.ceil(Math.log10(1.0001 * Math.max(...times)))];
  const oldest_s = Math.max(...recent.points.map((p) => p.age_s));
  const span_s = SPANS_S.find((s) => s >= oldest_s && s <= recent.window_s) ?? recent.window_s;
  const x = (age_s) => left + (width - left - right) * (1 - Math.min(1, age_s / span_s));
  const y = (s) => top + ((high - Math.log10(Math.max(s, 1e-4))) / Math.max(1, high - low)) * (height - top - bottom);
  const line = (kind, s, label, dy) => [
    draw("line", { class: kind, x1: left, x2: width - right, y1: y(s), y2: y(s) }),
    draw("text", { class: "strong", x: left + 6, y: y(s) + dy }, `${label} ${seconds(s)}`),
  ];
  const decades = Array.from({ length: high - low + 1 }, (_, i) => low + i);
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chartInWords(recent) },
    ...decades.flatMap((d) => [
      draw("line", { class: "grid", x1: left, x2: width - right, y1: y(10 ** d), y2: y(10 ** d) }),
      draw("text", { x: left - 6, y: y(10 ** d) + 4, "text-anchor": "end" }, decade(d)),
    ]),
    draw("text", { x: left, y: height - 4 }, `${minutes(span_s)} ago`),
    draw("text", { x: width - right, y: height - 4, "text-anchor": "end" }, "now"),
    ...recent.points.map((p) => requestDot(p, x(p.age_s), y(p.ttft_s))),
    ...line("p95", recent.ttft_p95_s, "p95", -5),
    ...line("p50", recent.ttft_p50_s, "median", 14));
}

function requestDot(point, x, y) {
  const { ttft_s, age_s, prompt_tokens, reused_tokens } = point;
  const from = `${count(reused_tokens)} of ${count(prompt_tokens)} tokens from the cache`;
  const told = `${seconds(ttft_s)}, ${age(age_s)} ago, ${from}`;
  const full = 2 * reused_tokens >= prompt_tokens ? "full" : null;
  return draw("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 3.5, class: full }, draw("title", null, told));
}

const decade = (d) => (d >= 0 ? `${count(10 ** d)} s` : d >= -3 ? `${count(10 ** (d + 3))} ms` : "0.1 ms");

function chartInWords({ requests, ttft_p50_s, ttft_p95_s }) {
  const what = `Time to the first token of ${plural(requests, "request", "requests")}`;
  return `${what}: median ${seconds(ttft_p50_s)}, 95 % within ${seconds(ttft_p95_s)}`;
}

// --- tables ---

function sources([recent, all]) {
  const line = (name, tokens) => [
    make("span", null, name),
    bar(KINDS.map((kind) => [kind, tokens[kind]]), { label: inWords(tokens) }),
    make("span", { class: "n" }, fromCache(tokens), make("span", { class: "unseen" }, " from the cache")),
  ];
  const numbers = (kind, tokens) => [{ n: count(tokens[kind]) }, { n: share(tokens[kind], total(tokens)) }];
  const row = (kind) => [kindCell(kind), ...numbers(kind, recent), ...numbers(kind, all)];
  return [
    make("div", { class: "meters" }, ...line("recent", recent), ...line("all", all)),
    table("Prompt tokens by source", ["source", { n: "recent" }, { n: "share" }, { n: "all" }, { n: "share" }], KINDS.map(row)),
    make("p", { class: "key dim" }, "recent: requests of the last minutes, as above. all: since the start. Beside a bar ",
      "stands the share that was not computed: exact, continued and moved."),
  ];
}

const inWords = (tokens) => KINDS.map((kind) => `${kind} ${share(tokens[kind], total(tokens))}`).join(", ");

function tiers([byName, pending]) {
  const filled = ({ bytes_used, bytes_limit }) => bar([["used", bytes_used]], { all: bytes_limit, size: "small" });
  const row = ([name, tier]) => [
    name, tier.bytes_limit ? filled(tier) : "", { n: bytes(tier.bytes_used) },
    { n: tier.bytes_limit ? bytes(tier.bytes_limit) : "none" },
    { n: count(tier.entries) }, { n: count(tier.pinned_entries) }, { n: failures(tier.errors) },
  ];
  const head = ["tier", "", { n: "used" }, { n: "limit" }, { n: "chunks" }, { n: "leased, pinned" }, { n: "failures" }];
  return [
    table("Memory by tier", head, Object.entries(byName).map(row)),
    make("p", { class: "key dim" }, `${bytes(pending)} wait to be written to slower tiers.`),
  ];
}

const failures = (errors) => {
  const some = Object.entries(errors).filter(([, n]) => n);
  return some.length ? some.map(([kind, n]) => `${kind} ${count(n)}`).join(", ") : "0";
};

function served([hits, repaired]) {
  const names = [...new Set([...Object.keys(hits), ...Object.keys(repaired).filter((s) => repaired[s])])];
  const rank = (name) => (name === "exact" ? 0 : name === "continued" ? 1 : 2);
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const row = (name) => {
    const asKept = rank(name) < 2;
    const first = asKept ? kindCell(name) : kindCell("moved", `moved, ${name}`);
    return [first, { n: count(hits[name] ?? 0) }, { n: asKept ? NOTHING : count(repaired[name] ?? 0) }];
  };
  const head = ["served", { n: "chunks" }, { n: "tokens repaired" }];
  return table("Chunks served", head, names.map(row), "No chunk has been served yet.");
}

function evictions(byName) {
  const names = Object.keys(byName);
  const reasons = [...new Set(names.flatMap((name) => Object.keys(byName[name].evictions)))].sort();
  const row = (why) => [
    make("span", null, EVICTED[why] ?? "", " ", make("small", { class: "dim" }, why)),
    ...names.map((name) => ({ n: count(byName[name].evictions[why] ?? 0) })),
  ];
  const head = ["reason", ...names.map((n) => ({ n }))];
  return table("Evictions by reason and tier", head, reasons.map(row), "No chunk has left a tier.");
}

function outcomes(service) {
  if (!service) return make("p", { class: "dim" }, "No server stands in front of this engine.");
  const now = [["waiting", service.queued], ["in prefill", service.prefilling], ["decoding", service.decoding]];
  const ended = Object.entries(service.finished).filter(([, n]) => n);
  const rows = (when, numbers) => numbers.map(([name, n]) => [`${when}: ${name}`, { n: count(n) }]);
  return table("Requests", ["requests", { n: "number" }], [...rows("now", now), ...rows("ended", ended)]);
}

function fallbacks(reasons) {
  const rows = Object.entries(reasons).sort((a, b) => b[1] - a[1]).map(([why, n]) => [why, { n: count(n) }]);
  return table("Fallbacks by reason", ["reason", { n: "requests" }], rows, "Every request went through the cache.");
}

function shadow([checks, { bound, values }]) {
  if (!checks.checks && !checks.failed) {
    const wanted = values?.shadow_share?.value;
    return make("p", { class: "dim" }, wanted
      ? `No check has been made yet; ${share(wanted, 1)} of the requests with inexact rows are checked.`
      : "None are made (shadow_share is 0). They tell how far answers over moved text are from full prefills.");
  }
  const over = bound !== null && bound !== undefined && checks.kl_p95 > bound;
  return table("Checks against full prefills", ["of the first token", { n: "" }], [
    ["KL, p95 of the last checks", { n: checks.kl_p95 === null ? NOTHING : `${checks.kl_p95.toPrecision(2)} nat` }],
    ["bound of the settings", { n: `${bound ?? NOTHING} nat${over ? ", exceeded" : ""}` }],
    ["same most likely token", { n: checks.agreement === null ? NOTHING : share(checks.agreement, 1) }],
    ["checks made", { n: count(checks.checks) }],
    ["dropped, failed", { n: `${count(checks.dropped)}, ${count(checks.failed)}` }],
  ]);
}

function settings({ generation, rejected, file, overrides, values }) {
  const row = (name) => [name, String(values[name].value ?? "unset"), values[name].origin];
  return [
    table("Settings in force", ["setting", "value", "from"], Object.keys(values ?? {}).map(row), "None: see above."),
    make("p", { class: "key dim" },
      `Generation ${count(generation)}. `,
      file ? `File ${file}: ${plural(rejected, "version", "versions")} rejected. ` : "No settings file. ",
      overrides.length ? `Overridden by an administrator: ${overrides.join(", ")}.` : "No administrator's overrides."),
  ];
}
