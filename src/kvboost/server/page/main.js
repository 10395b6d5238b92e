// The page as a whole: which view is shown, who may look, and the questions that are asked again and again.

const POLL_MS = 2000;
const LONGEST_POLL_MS = 16000;
const VIEWS = { "#overview": "overview", "#xray": "xray" };
const poll = { timer: 0, asking: false, paused: false, failures: 0 };
let chosen = "overview";

// --- views ---

/** Shows what the address asks for, or the form for the token. With `focus`, the view's heading gets it. */
function route(focus = false) {
  chosen = VIEWS[location.hash] ?? chosen;
  const view = mayAsk() ? chosen : "sign-in";
  for (const name of ["sign-in", ...Object.values(VIEWS)]) $(`view-${name}`).hidden = name !== view;
  for (const name of Object.values(VIEWS)) {
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  $("nav").hidden = $("controls").hidden = !mayAsk();
  $("forget").hidden = !tokenNeeded;
  document.title = { "sign-in": "KVBoost: token", overview: "KVBoost: overview", xray: "KVBoost: X-ray" }[view];
  if (view === "xray") listKept();
  if (view === "sign-in") $("token").focus();
  else if (focus) $(`h-${view}`).focus();
}

// --- who may look ---

async function signIn(event) {
  event.preventDefault();
  const given = $("token").value.trim();
  $("token-error").textContent = "";
  try {
    await ask("admin/overview", { as: given });
  } catch (error) {
    $("token-error").textContent = error.status === 401 ? "The server does not accept this token." : sentence(error);
    $("token").select();
    return;
  }
  token.set(given);
  $("token").value = "";
  route(true);
  tick();
}

function signOut(why) {
  token.set(null);
  clearTimeout(poll.timer);
  for (const id of [...shown.keys(), "kept", "map", "segments", "detail", "strip"]) $(id).replaceChildren();
  shown.clear();
  xray.result = null;
  $("prompt").value = $("namespace").value = $("session").value = "";
  $("result").hidden = true;
  $("token-error").textContent = why;
  route();
}

/** Whether the server does not know our token (any more); then it is asked for again. */
function expelled(error) {
  if (!(error instanceof Refused && error.status === 401)) return false;
  if (tokenNeeded) signOut("The server does not accept the token any more.");
  return tokenNeeded;
}

// --- again and again ---

async function tick() {
  clearTimeout(poll.timer);
  if (poll.asking || poll.paused || document.hidden || !mayAsk()) return;
  poll.asking = true;
  let seen = null;
  try {
    seen = await ask("admin/overview", { patience_ms: 10000 });
  } catch (error) {
    if (!expelled(error) && !poll.paused) lost(error);
  } finally {
    poll.asking = false;
  }
  if (poll.paused || !mayAsk()) return; // since it was asked
  if (seen !== null) {
    reached();
    showOverview(seen);
  }
  poll.timer = setTimeout(tick, Math.min(LONGEST_POLL_MS, POLL_MS * 2 ** poll.failures));
}

function reached() {
  if (poll.failures) say("The server answers again.");
  poll.failures = 0;
  link("live", `live, ${clock(new Date())}`);
}

function lost(error) {
  poll.failures += 1;
  link("lost", "not reachable");
  const since = shown.has("tiles") ? " What is shown is old." : "";
  const told = `${sentence(error)}${since} It is asked again.`;
  show("alerts", ["lost", told], () => make("p", { class: "alert bad" }, told));
}

function link(state, text) {
  $("link").className = `link ${state}`;
  $("link").textContent = text;
}

function togglePause() {
  poll.paused = !poll.paused;
  $("pause").setAttribute("aria-pressed", String(poll.paused));
  if (poll.paused) {
    clearTimeout(poll.timer);
    link("paused", `paused at ${clock(new Date())}`);
  } else tick();
}

$("sign-in").addEventListener("submit", signIn);
$("forget").addEventListener("click", () => signOut(""));
$("pause").addEventListener("click", togglePause);
addEventListener("hashchange", () => {
  if (!(location.hash in VIEWS)) return; // the skip link
  route(true);
  tick();
});
document.addEventListener("visibilitychange", tick);
setUpXray();
route();
tick();
